"""Measure speed and peak memory of an optimizer step: ours, Hugging Face's model, and a plain loop for GPT-2.

    python bench/step.py --shapes bert-mini:128 bert-base:512:0.3 gpt2-small:512 modernbert-base:1024 --json FILE

A shape is MODEL:LENGTH[:PADDING]; MODEL is bert or gpt2 with a size, or a preset of ModernBERT or its decoder; PADDING
is the share of padding in a rectangular batch. Each peer runs in its own process, which gives each its own peak memory;
they take turns, one step each. All use the same sequences, torch, threads, AdamW (fused), clipping, and dropout as
published. Hugging Face's loop does what its Trainer does between two batches. Tokens do not include padding.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import step_peers
from step_peers import PEERS, Case, lengths_of, num_masked

_VOCABULARIES = {"bert": 30522, "gpt2": 50257}
_MODERN_VOCABULARY = 50368
SIZES = {
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "xl": (48, 1600, 25),
}
ALL_SHAPES = [
    f"{family}-{size}:{length}{padding}"
    for family in ("bert", "gpt2")
    for size in ("mini", "small", "base")
    for length in (128, 512)
    for padding in ("", ":0.3")
]


def case_of(shape: str, arguments: argparse.Namespace) -> Case:
    """Return a peer's input, which is sent to it as JSON."""
    from multihop.pretrain.models.families import FAMILIES, parse_model_config

    model, length, *padding = shape.split(":")
    family, _, size = model.rpartition("-")
    section: dict[str, Any] = {"preset": model}
    if family in ("bert", "gpt2"):
        layers, hidden, heads = SIZES[size]
        section = {"family": family, "layers": layers, "hidden": hidden, "heads": heads, "dropout": arguments.dropout}
        section["max_positions"] = max(512, int(length))
    config = parse_model_config(section)
    return {
        "shape": shape,
        "model": config.model_dump(),
        "vocabulary": _VOCABULARIES.get(config.family, _MODERN_VOCABULARY),
        "causal": FAMILIES[config.family].causal,
        "mask_rate": 0.15 if config.family == "bert" else 0.3,
        "length": int(length),
        "padding": float(padding[0]) if padding else 0.0,
        "sequences": max(1, arguments.tokens // int(length)),
        "precision": arguments.precision,
        "threads": arguments.threads,
        "compile": arguments.compile,
        "seed": 1,
    }


def flops_of(case: Case) -> tuple[float, float]:
    """Return the FLOPs of a step: those that are needed, and those of a padded batch with all its logits."""
    from multihop.pretrain.models.families import parse_model_config

    model = parse_model_config(case["model"])
    lengths, full = lengths_of(case), np.full(case["sequences"], case["length"])
    asked = int(lengths.sum()) if case["causal"] else sum(num_masked(case, length) for length in lengths)
    vocabulary = case["vocabulary"]
    return model.train_flops(vocabulary, lengths, asked), model.train_flops(vocabulary, full, int(full.sum()))


def measure(case: Case, names: list[str], script: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return wall-clock and processor times of the steps, peak memory and profile, each by peer."""
    groups = [[name] for name in names] if getattr(arguments, "one_at_a_time", False) else [names]
    found: dict[str, Any] = {}
    for group in groups:
        for kind, of_peers in _interleaved(case, group, script, arguments).items():
            found.setdefault(kind, {}).update(of_peers)
    return found


def _interleaved(case: Case, names: list[str], script: str, arguments: argparse.Namespace) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
    processes = {}
    for name in names:
        processes[name] = subprocess.Popen(
            [sys.executable, script, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments.verbose else subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        say(processes[name], json.dumps({**case, "port": str(29500 + os.getpid() % 1000)}))
    for _ in range(arguments.warm_up):
        for name in names:
            ask(processes[name], name, "step")
    times: dict[str, list[float]] = {name: [] for name in names}
    used: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.repeats):
        for name in names:
            answer = ask(processes[name], name, "step")
            times[name].append(answer["seconds"])
            used[name].append(answer["cpu_seconds"])
    profiles = {name: ask(processes[name], name, "profile")["profile"] for name in names} if arguments.profile else {}
    peaks = {name: ask(processes[name], name, "end")["peak"] for name in names}
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return {"seconds": times, "cpu_seconds": used, "peak_bytes": peaks, "profile": profiles}


@contextmanager
def start_peer(name: str, case: Case) -> Iterator[Callable[[], float]]:
    """Start a peer in its own process, and yield a function that runs one step and returns its seconds."""
    process = subprocess.Popen(
        [sys.executable, step_peers.__file__, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(case["threads"])},
        text=True,
    )
    say(process, json.dumps({**case, "port": str(29500 + os.getpid() % 1000)}))
    try:
        yield lambda: ask(process, name, "step")["seconds"]
    finally:
        process.stdin.close()
        process.wait()


def say(process: Any, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ask(process: Any, name: str, what: str) -> dict[str, Any]:
    say(process, what)
    for line in process.stdout:
        if line.startswith('{"peer"'):
            return json.loads(line)
    raise SystemExit(f"{name} exited; run with --verbose to see why")


def row_of(case: Case, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return the ratios of a case; ratios of times are medians over the turns."""
    needed, rectangle = flops_of(case)
    mine = found["seconds"]["ours"]
    tokens = int(lengths_of(case).sum())
    row: dict[str, Any] = {
        "shape": case["shape"],
        "tokens_per_s": tokens / statistics.median(mine),
        "ratio_by_flops": rectangle / needed,
        "share_of_matmul_rate": needed / statistics.median(mine) / rate,
    }
    for name, theirs in found["seconds"].items():
        if name != "ours":
            ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
            row[name] = {
                "speed": statistics.median(ratios),
                "speed_from_to": [ratios[0], ratios[-1]],
                "memory": found["peak_bytes"]["ours"] / found["peak_bytes"][name],
            }
    return row


def print_profiles(found: dict[str, Any]) -> None:
    """Print the most expensive operations of each peer, if they were measured."""
    for name, costs in found["profile"].items():
        print(f"    {name}: " + ", ".join(f"{operation} {share:.0%}" for operation, share in costs))


def write_report(path: Path, rate: float, results: list[dict[str, Any]]) -> None:
    """Write the results as JSON, with the date, the machine and its rate of matrix products."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {"platform": platform.platform(), "torch": torch.__version__, "matmul_flops_per_s": rate}
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **machine, "results": results}
    path.write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=ALL_SHAPES)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tokens", type=int, default=4096, help="a step's tokens, with padding (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="of bert and gpt2; presets have their own")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action="store_true", help="ours layer by layer, theirs as a whole")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="do not interleave peers: memory holds one of them"
    )
    parser.add_argument("--profile", action="store_true", help="print each peer's most expensive operations")
    parser.add_argument("--verbose", action="store_true", help="show the peers' output")
    parser.add_argument("--json", type=Path, default=Path("bench/results/step.json"))
    arguments = parser.parse_args()

    import torch

    from multihop.pretrain.engine.device import matmul_rate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    rate = matmul_rate(device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32)
    print(f"torch {torch.__version__}, {arguments.threads} threads, matrix products {rate / 1e9:,.0f} GFLOP/s")
    print(f"{'shape':22} {'tokens/s':>9} {'of matmul':>9} {'by FLOPs':>8}  speed and memory beside each peer")
    results = []
    for shape in arguments.shapes:
        case = case_of(shape, arguments)
        names = [name for name in arguments.peers if name != "plain" or case["model"]["family"] == "gpt2"]
        found = measure(case, names, step_peers.__file__, arguments)
        row = row_of(case, found, rate)
        results.append({**row, **found, "case": case})
        beside = "  ".join(
            "{} {:.2f}x ({:.2f}-{:.2f}) mem {:.2f}".format(
                name, row[name]["speed"], *row[name]["speed_from_to"], row[name]["memory"]
            )
            for name in found["seconds"]
            if name != "ours"
        )
        print(
            f"{shape:22} {row['tokens_per_s']:9,.0f} {row['share_of_matmul_rate']:9.0%} {row['ratio_by_flops']:8.2f}  "
            f"{beside}",
            flush=True,
        )
        print_profiles(found)
    write_report(arguments.json, rate, results)


if __name__ == "__main__":
    main()
