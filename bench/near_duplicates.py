"""Measure the speed of near-duplicate detection next to datatrove, datasketch and rensa, in turn on one core.

    python bench/near_duplicates.py texts/                       # ours alone
    python -m venv /tmp/peers && /tmp/peers/bin/pip install datasketch rensa \\
        datatrove spacy nltk tokenizers regex ftfy 'xxhash<4'
    python bench/near_duplicates.py texts/ --peers /tmp/peers/bin/python

`texts/` holds .jsonl or .jsonl.gz files with a field `text`. Every peer is a process of its own that reads the texts
before it starts its clock. `signatures` is the time from text to 128 values per document, or the time of hashing alone
where words or shingles are given (to ours as hashes, to rensa as strings); `whole stage` is the time until it is known
which documents to drop. The whole stages of ours and datatrove write files (ours syncs them), that of datasketch works
in memory. datatrove splits words with spaCy; it is measured with words split at blanks, too.
"""

import argparse
import gzip
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

OURS = ("ours", "ours-words")
PEERS = ("datatrove", "datatrove-split", "datasketch", "rensa", "rensa-shingles", "rensa-text")
NAMES = {
    "ours": "multihop",
    "ours-words": "multihop, words ready as hashes",
    "datatrove": "datatrove",
    "datatrove-split": "datatrove, words split at blanks",
    "datasketch": "datasketch, MinHash and MinHashLSH",
    "rensa": "rensa RMinHash, words ready",
    "rensa-shingles": "rensa RMinHash, shingles ready",
    "rensa-text": "rensa RMinHash, shingles by Python",
}


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--mb", type=float, default=20.0, help="megabytes of text that are taken from it")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=None, help="a python that has datatrove, datasketch and rensa")
    parser.add_argument("--without", nargs="*", default=[], choices=PEERS, help="peers that are left out")
    parser.add_argument("--json", type=Path, default=Path("bench/results/near_duplicates.json"))
    options = parser.parse_args()
    pythons = dict.fromkeys(OURS, sys.executable)
    if options.peers:
        pythons |= {name: str(options.peers.absolute()) for name in PEERS if name not in options.without}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory(prefix="near-duplicates-") as folder:
        texts = Path(folder) / "texts.jsonl"
        documents, size = take_texts(options.texts, int(options.mb * 1e6), texts)
        for repeat in range(options.repeats):
            for name in list(pythons) if repeat % 2 else reversed(pythons):  # none always runs first
                measured[name].append(run(pythons[name], name, texts))
    result = {
        "date": date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()[0]},
        "documents": documents,
        "bytes": size,
        "peers": {name: summary(rows, size) for name, rows in measured.items()},
        "measured": measured,
    }
    show(result, options.repeats)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def take_texts(folder: Path, size: int, target: Path) -> tuple[int, int]:
    """Write the first `size` bytes of text, in whole documents, to `target`; returns how many documents and bytes."""
    documents = taken = 0
    with open(target, "w") as file:
        for path in sorted([*folder.glob("**/*.jsonl"), *folder.glob("**/*.jsonl.gz")]):
            with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
                for line in lines:
                    text = json.loads(line)["text"]
                    file.write(json.dumps({"text": text}) + "\n")
                    documents, taken = documents + 1, taken + len(text.encode())
                    if taken >= size:
                        return documents, taken
    return documents, taken


def run(python: str, name: str, texts: Path) -> dict[str, Any]:
    """Run a peer; returns what it prints: seconds of its parts, its results, its versions."""
    script = Path(__file__).with_name("near_duplicates_peers.py")
    root = str(script.parents[1] / "src")
    one_core = {key: "1" for key in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    environment = os.environ | one_core | ({"PYTHONPATH": root} if name in OURS else {"PYTHONPATH": ""})
    command = [python, str(script), name, str(texts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(rows: list[dict[str, Any]], size: int) -> dict[str, Any]:
    """Return the medians in MB per wall-clock and per processor second, and the wall-clock spread over the median."""
    rates, cpu_rates = (
        {
            part: size / 1e6 / statistics.median(row["seconds"][part][clock] for row in rows)
            for part in rows[0]["seconds"]
        }
        for clock in (0, 1)
    )
    seconds = [list(row["seconds"].values())[-1][0] for row in rows]
    return {
        "mb_per_s": rates,
        "mb_per_cpu_s": cpu_rates,
        "spread": (max(seconds) - min(seconds)) / statistics.median(seconds),
        "dropped": rows[0]["dropped"],
        "versions": rows[0]["versions"],
    }


def show(result: dict[str, Any], repeats: int) -> None:
    print(
        f"{result['documents']} documents, {result['bytes'] / 1e6:.1f} MB; medians of {repeats}; "
        "MB a second of the clock (and of the processor); "
        + ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    )
    print(f"{'':36}{'signatures':>17}{'whole stage':>17}{'spread':>8}{'dropped':>9}  versions")
    for name, row in result["peers"].items():
        rates = [f"{row['mb_per_s'][part]:.2f} ({row['mb_per_cpu_s'][part]:.2f})" for part in row["mb_per_s"]] + [""]
        dropped = "" if row["dropped"] is None else str(row["dropped"])
        versions = ", ".join(f"{key} {value}" for key, value in row["versions"].items())
        print(f"{NAMES[name]:36}{rates[0]:>17}{rates[1]:>17}{100 * row['spread']:>7.0f}%{dropped:>9}  {versions}")
    compared = [("ours", name) for name in PEERS] + [("ours-words", "rensa"), ("ours-words", "rensa-shingles")]
    for one, name in compared:
        if name in result["peers"]:
            ours, theirs = result["peers"][one], result["peers"][name]
            ratios = [
                f"{part} {ours['mb_per_s'][part] / rate:.2f} ({ours['mb_per_cpu_s'][part] / cpu_rate:.2f})"
                for (part, rate), cpu_rate in zip(
                    theirs["mb_per_s"].items(), theirs["mb_per_cpu_s"].values(), strict=True
                )
            ]
            print(f"{NAMES[one]}, of {NAMES[name]}: {', '.join(ratios)} times")


if __name__ == "__main__":
    main()
