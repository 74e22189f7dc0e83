"""Measure reading the tokens of documents in random order, ours next to the peers:

    python bench/read_tokens.py --data FOLDER --peers PYTHON

FOLDER is a prepared data set. PYTHON is the interpreter of an environment with the peers; each is first given the same
documents in its own format, which is not measured. Then all take turns at reading the same documents in the same random
order, each in a process of its own, from files that are in the page cache; the tokens that they read are compared.

    python -m venv peers && peers/bin/pip install datasets litdata mosaicml-streaming
"""

import argparse
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

PEERS = ("datasets", "litdata", "streaming")


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", default=None, help="the Python of the peers' environment; without it ours alone")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, help="of the peers")
    parser.add_argument("--reads", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/read_tokens.json"))
    options = parser.parse_args()
    pythons = {"ours": sys.executable} | ({name: options.peers for name in options.only} if options.peers else {})
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory(prefix="read-tokens-") as scratch:
        for name in pythons:
            if name != "ours":
                run(pythons[name], "build", name, options.data, Path(scratch) / name, options.reads)
        for _ in range(options.repeats):
            for name, python in pythons.items():
                printed = run(python, "read", name, options.data, Path(scratch) / name, options.reads)
                measured[name].append(next(json.loads(line) for line in reversed(printed) if line.startswith('{"sec')))
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "reads": options.reads,
        "measured": measured,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


def run(python: str, what: str, name: str, data: Path, store: Path, reads: int) -> list[str]:
    """Run one way; returns the lines that it printed."""
    script = Path(__file__).with_name("read_tokens_peers.py")
    packages = str(script.parents[1] / "src") if name == "ours" else ""
    environment = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    command = [python, str(script), what, name, "--data", str(data), "--store", str(store), "--reads", str(reads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()


def show(report: dict[str, Any]) -> None:
    """Print the table, and the ratio of ours to each."""
    rows_of = report["measured"]
    seen = {name: (rows[0]["tokens"], rows[0]["checksum"]) for name, rows in rows_of.items()}
    if len(set(seen.values())) > 1:
        raise SystemExit(f"they read different tokens: {seen}")
    print(f"{report['reads']:,} documents at random, {report['machine']}")
    print(f"{'':12}{'documents/s':>13}{'from':>10}{'to':>10}{'open, ms':>10}  version")
    rates = {}
    for name, rows in rows_of.items():
        of_each = [report["reads"] / row["seconds"] for row in rows]
        rates[name] = statistics.median(of_each)
        opening = 1000 * statistics.median(row["open_s"] for row in rows)
        print(
            f"{name:12}{rates[name]:>13,.0f}{min(of_each):>10,.0f}{max(of_each):>10,.0f}{opening:>10.1f}"
            f"  {rows[0]['version']}"
        )
    for name, rate in rates.items():
        if name != "ours":
            print(f"ours is {rates['ours'] / rate:.1f} times {name}")


if __name__ == "__main__":
    main()
