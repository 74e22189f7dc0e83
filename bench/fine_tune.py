"""Measure seconds and scores of fine-tuning a published model on a task: ours, and Hugging Face's Trainer.

    python bench/fine_tune.py --model DIR --data-dir DIR --task glue/sst2 --max-examples 2000

All start from the same weights and use the same examples, batch size, learning rate, schedule, epochs, seeds and
threads. Peers take turns, one trial each, in a process of their own that has imported its libraries. The time of a
trial includes reading and tokenizing the task (which we cache after the first), fine-tuning, and scoring the
development examples after each epoch and the test examples. Needs transformers and accelerate.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fine_tune_peers
from fine_tune_peers import PEERS


def measure(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return a dictionary of seconds and score for each seed, by peer."""
    case = {
        "model": str(arguments.model.absolute()),
        "data_dir": str(arguments.data_dir.absolute()),
        "threads": arguments.threads,
        "task": {
            "name": arguments.task,
            "epochs": arguments.epochs,
            "batch_size": arguments.batch_size,
            "lr": arguments.lr,
            "seq_len": arguments.seq_len,
            "max_examples": arguments.max_examples,
            "max_dev_examples": arguments.max_dev_examples,
        },
    }
    processes = {
        name: subprocess.Popen(
            [sys.executable, fine_tune_peers.__file__, name, json.dumps(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments.verbose else subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": str(arguments.threads)},
            text=True,
        )
        for name in arguments.peers
    }
    for name, process in processes.items():
        _answer(process, name)  # comes once its libraries are imported
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in processes}
    for seed in arguments.seeds:
        for name, process in processes.items():
            assert process.stdin is not None
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
            found[name].append({"seed": seed, **_answer(process, name)})
            print(f"seed {seed}  {name:18} {found[name][-1]}", file=sys.stderr, flush=True)
    for process in processes.values():
        process.communicate()
    return found


def _answer(process: "subprocess.Popen[str]", name: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith('{"peer"'):
            answer: dict[str, Any] = json.loads(line)
            del answer["peer"]
            return answer
    raise SystemExit(f"{name} exited; run with --verbose to see why")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a Hugging Face model")
    parser.add_argument("--data-dir", type=Path, required=True, help="directory of the official files")
    parser.add_argument("--task", default="glue/sst2")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--max-examples", type=int, default=2000)
    parser.add_argument("--max-dev-examples", type=int, default=500)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--verbose", action="store_true", help="show the peers' output")
    parser.add_argument("--json", type=Path, default=Path("bench/results/fine_tune.json"))
    arguments = parser.parse_args()

    found = measure(arguments)
    mine = found.get("ours", [])
    print(
        f"{arguments.task}, {arguments.max_examples} examples, {arguments.epochs:g} epochs, {arguments.threads} threads"
    )
    print(f"{'':18} {'seconds':>8} {'first':>8} {'beside ours':>20}  score, median (from to)")
    for name, turns in found.items():
        seconds, scores = [each["seconds"] for each in turns], sorted(each["value"] for each in turns)
        ratios = sorted(b / a["seconds"] for a, b in zip(mine, seconds, strict=True)) if mine else []
        beside = f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios else ""
        spread = f"{statistics.median(scores):.3f} ({scores[0]:.3f} to {scores[-1]:.3f})"
        print(f"{name:18} {statistics.median(seconds):8.1f} {seconds[0]:8.1f} {beside:>20}  {spread}")

    import torch
    import transformers

    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "arguments": {name: str(value) for name, value in vars(arguments).items()},
        "results": found,
    }
    arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
