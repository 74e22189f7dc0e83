"""Measure tokens per second of greedy generation: ours, and transformers' `generate` on the same weights.

    python bench/generate.py --batch 1 32

A GPT-2 of random weights continues prompts of random tokens. Each peer runs in its own process; they take turns, one
generation each. `same` is the share of the new tokens that both chose, up to the first difference in each text: the two
add in different orders, and random weights have near ties.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import generate_peers
from generate_peers import PEERS, Case


def measure(case: Case, peers: Iterable[str], script: str, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return each peer's wall-clock and processor seconds, and the tokens that it generated."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
    processes = {
        name: subprocess.Popen(
            [sys.executable, script, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        for name in peers
    }
    for process in processes.values():
        say(process, json.dumps(case))
    warm = {name: ask(process, name) for name, process in processes.items()}
    times: dict[str, Any] = {clock: {name: [] for name in processes} for clock in ("seconds", "cpu_seconds")}
    for _ in range(repeats):
        for name, process in processes.items():
            answer = ask(process, name)
            for clock, of_peers in times.items():
                of_peers[name].append(answer[clock])
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return times, {name: answer["tokens"] for name, answer in warm.items()}


def share_of_same(mine: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share of the new tokens that both chose, up to the first difference in each text."""
    same = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=True)))
        for texts in zip(mine, theirs, strict=True)
    ]
    return sum(same) / sum(map(len, theirs))


def say(process: Any, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ask(process: Any, name: str) -> dict[str, Any]:
    say(process, "generate")
    for line in process.stdout:
        if line.startswith('{"peer"'):
            return json.loads(line)
    raise SystemExit(f"{name} exited; run bench/generate_peers.py {name} to see why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32], help="prompts at a time (default: 1 32)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the longest prompt (default: %(default)s)")
    parser.add_argument("--unequal", action="store_true", help="prompts of half to all of that length")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each text (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/generate.json"))
    arguments = parser.parse_args()

    import torch

    print(f"torch {torch.__version__}, {arguments.threads} threads")
    print(f"{'batch':>5} {'tokens/s':>9}  speed beside transformers (from-to)  same")
    results = []
    for batch in arguments.batch:
        sizes = {name: getattr(arguments, name) for name in ("layers", "hidden", "heads", "prompt", "new", "threads")}
        case = {**sizes, "batch": batch, "unequal": arguments.unequal, "seed": 1}
        times, tokens = measure(case, PEERS, generate_peers.__file__, arguments.repeats)
        same, seconds = share_of_same(*tokens.values()), times["seconds"]
        ratios = sorted(theirs / mine for mine, theirs in zip(seconds["ours"], seconds["hugging_face"], strict=True))
        speed = batch * arguments.new / statistics.median(seconds["ours"])
        print(
            f"{batch:5} {speed:9,.1f}  {statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})"
            f"{'':16} {same:.1%}",
            flush=True,
        )
        results.append({"case": case, **times, "ratio": statistics.median(ratios), "same": same})
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "results": results,
    }
    arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
