"""Measure turning text into tokens on the disk, ours next to the peers:

    python bench/prepare_text.py --texts FOLDER --peers PYTHON

FOLDER holds `.jsonl.gz` files, at any depth, with a `text` in each line. All use one vocabulary: a SentencePiece
unigram model that is trained on the first texts, and the same as Hugging Face's fast tokenizer. PYTHON is the
interpreter of an environment with the peers. It must not be ours, because a peer may install another torch:

    python -m venv peers && peers/bin/pip install datasets transformers datatrove[io] orjson

Each run is a process of its own that times its work after its imports; the peers take turns. The memory is the largest
sum of the proportional set sizes of its processes. It is read only twice a second, because reading takes time from the
workers.
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
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import psutil

OURS = ("ours", "sentencepiece")
PEERS = ("datasets", "datatrove")


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--peers", default=None, help="the Python of the peers' environment; without it ours alone")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=16_000)
    parser.add_argument("--sample-mb", type=float, default=10.0, help="of text that the tokenizer is trained on")
    parser.add_argument("--json", type=Path, default=Path("bench/results/prepare_text.json"))
    options = parser.parse_args()
    ways = {name: sys.executable for name in OURS} | {name: options.peers for name in PEERS if options.peers}
    size = sum(len(text.encode()) for text in read_texts(options.texts))
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="prepare-text-") as scratch:
        tokenizer = make_tokenizer(options.texts, options.vocab, options.sample_mb, Path(scratch) / "tokenizer")
        for repeat in range(options.repeats):
            for workers in options.workers:
                for name, python in ways.items():
                    out = Path(scratch) / f"{name}-{workers}-{repeat}"
                    row = run(python, name, options.texts, tokenizer, out, workers)
                    measured.append({"name": name, "workers": workers, **row})
                    print(f"{name} {workers}: {row['seconds']:.1f} s", file=sys.stderr, flush=True)
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "text_bytes": size,
        "vocab": options.vocab,
        "measured": measured,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report, options.repeats)


def read_texts(folder: Path) -> Iterator[str]:
    """Yield the texts of all files, one after the other."""
    for path in sorted(folder.rglob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def make_tokenizer(texts: Path, vocab: int, sample_mb: float, out: Path) -> Path:
    """Write tokenizer.model and tokenizer.json with the same tokens into `out`; returns `out`."""
    from multihop.data_prep.config import TokenizerConfig
    from multihop.data_prep.rules.clean import clean
    from multihop.data_prep.rules.sentences import split_sentences
    from multihop.data_prep.tokenizers.export import build_tokenizer
    from multihop.data_prep.tokenizers.tokenizer import describe
    from multihop.data_prep.tokenizers.training import train

    sentences, size = [], 0
    for text in read_texts(texts):
        if size > sample_mb * 1e6:
            break
        sentences += split_sentences(clean(text))
        size += len(text.encode())
    model = train(sentences, TokenizerConfig(vocab_size=vocab))
    out.mkdir()
    (out / "tokenizer.model").write_bytes(model)
    build_tokenizer(model, describe(model, "").special_ids, has_token_types=True).save(str(out / "tokenizer.json"))
    return out


def run(python: str, name: str, texts: Path, tokenizer: Path, out: Path, workers: int) -> dict[str, Any]:
    """Run one way; returns what it prints, and its peak memory in bytes."""
    out.mkdir()
    script = Path(__file__).with_name("prepare_text_peers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["RAYON_NUM_THREADS"] = "1"
    environment["PYTHONPATH"] = str(script.parents[1] / "src") if name in OURS else ""
    command = [python, str(script), name, "--texts", str(texts), "--tokenizer", str(tokenizer), "--out", str(out)]
    with open(out / "output.txt", "w") as output:
        process = subprocess.Popen([*command, "--workers", str(workers)], stdout=output, stderr=output, env=environment)
        peak = 0
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(0.5)
    printed = (out / "output.txt").read_text()
    if process.returncode:
        raise SystemExit(f"{name} failed:\n{printed[-4000:]}")
    last: dict[str, Any] = next(json.loads(line) for line in reversed(printed.splitlines()) if line.startswith('{"sec'))
    return {**last, "peak_bytes": peak}


def _memory(pid: int) -> int:
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has just ended
            continue
    return total


def show(report: dict[str, Any], repeats: int) -> None:
    """Print the table, and the ratio of ours to each."""
    print(f"{report['text_bytes'] / 1e6:.1f} MB of text, {report['machine']}; medians of {repeats}")
    print(f"{'':16}{'workers':>8}{'MB/s':>8}{'from':>8}{'to':>8}{'peak MB':>9}{'tokens':>13}  version")
    rates: dict[tuple[str, int], float] = {}
    for name, workers in dict.fromkeys((row["name"], row["workers"]) for row in report["measured"]):
        rows = [row for row in report["measured"] if (row["name"], row["workers"]) == (name, workers)]
        of_each = [row.get("text_bytes", report["text_bytes"]) / 1e6 / row["seconds"] for row in rows]
        rates[name, workers] = statistics.median(of_each)
        peak = statistics.median(row["peak_bytes"] for row in rows) / 1e6
        print(
            f"{name:16}{workers:>8}{rates[name, workers]:>8.2f}{min(of_each):>8.2f}{max(of_each):>8.2f}{peak:>9.0f}"
            f"{rows[0]['tokens']:>13,}  {rows[0]['version']}"
        )
    for (name, workers), rate in rates.items():
        if name != "ours":
            print(f"ours is {rates['ours', workers] / rate:.2f} times {name} with {workers}")
    fewest = min(workers for _, workers in rates)
    for more in (workers for name, workers in rates if name == "ours" and workers > fewest):
        print(f"ours with {more} is {rates['ours', more] / rates['ours', fewest]:.2f} times itself with {fewest}")


if __name__ == "__main__":
    main()
