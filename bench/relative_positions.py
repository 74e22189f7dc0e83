"""Measure the memory of attention with relative positions against sequence length n, next to other computations.

    python bench/relative_positions.py

One sequence, 12 heads of width 64 (BERT-base), distances clipped at 16, fp32, forward and backward of attention without
its projections. The peak is the largest number of bytes that torch has allocated, without the inputs, as its profiler
records every allocation: it is the same on a busy machine. A power of n is fitted over the larger half of the lengths.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from layer_costs import exponent
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from multihop.pretrain.models.layers.attention import Sequences, attend

HEADS, WIDTH, MAX_DISTANCE = 12, 64, 16
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys, values (n, heads, width), and embeddings of distances (2 * MAX_DISTANCE + 1, width)."""


def absolute(dropout: float) -> Attention:
    return lambda q, k, v, a: attend(q, k, v, whole(q), False, dropout)


def ours(dropout: float) -> Attention:
    return lambda q, k, v, a: attend(q, k, v, whole(q), False, dropout, q @ a.T)


def gathered(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    each = clipped(len(q)).expand(HEADS, -1, -1)
    scores = torch.einsum("qhw,khw->hqk", q, k) + (q @ a.T).transpose(0, 1).gather(2, each)
    return torch.einsum("hqk,khw->qhw", (scores * WIDTH**-0.5).softmax(-1), v)


def direct(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
    of_pairs = a[clipped(len(q))]
    scores = torch.einsum("qhw,khw->hqk", q, k) + torch.einsum("qhw,qkw->hqk", q, of_pairs)
    return torch.einsum("hqk,khw->qhw", (scores * WIDTH**-0.5).softmax(-1), v)


@dataclass(frozen=True)
class Kind:
    """A way to compute attention."""

    name: str
    attention: Attention
    theory: str
    """The term that grows fastest with n."""
    longest: int
    """Maximum length of a sequence; longer ones would take too much memory."""


KINDS = (
    Kind("absolute positions", absolute(0.0), "n d", 8192),
    Kind("absolute positions, dropout", absolute(0.1), "n^2 bytes", 8192),
    Kind("relative, as in training", ours(0.0), "n (d + k)", 8192),
    Kind("relative, as in training, dropout", ours(0.1), "n^2 bytes", 8192),
    Kind("relative, q a gathered by autograd", gathered, "n^2", 2048),
    Kind("relative, a vector for each pair", direct, "n^2 d", 2048),
)


def whole(q: Tensor) -> Sequences:
    return Sequences(torch.tensor([0, len(q)]), len(q), len(q))


def clipped(n: int) -> Tensor:
    """Return int64 (n, n), the row of the embeddings for each pair."""
    positions = torch.arange(n)
    return (positions[None] - positions[:, None]).clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE


def peak_bytes(attention: Attention, n: int) -> int:
    """Return the peak memory of a forward and backward pass in bytes."""
    shapes = [(n, HEADS, WIDTH)] * 3 + [(2 * MAX_DISTANCE + 1, WIDTH)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        attention(*inputs).sum().backward()
    results = profiled.profiler.kineto_results
    events = [each for each in results.events() if each.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--json", type=Path, default=Path("bench/results/relative_positions.json"))
    arguments = parser.parse_args()
    torch.manual_seed(1)
    print(f"torch {torch.__version__}; peak MiB at n, and the fitted power of n")
    print(f"{'':36}{'theory':>10}{'fitted':>8}" + "".join(f"{n:>9}" for n in arguments.lengths))
    rows = []
    for kind in KINDS:
        lengths = [n for n in arguments.lengths if n <= kind.longest]
        peaks = [peak_bytes(kind.attention, n) for n in lengths]
        power = exponent(lengths, [float(peak) for peak in peaks])
        cells = "".join(f"{peak / 2**20:>9.1f}" for peak in peaks)
        print(f"{kind.name:36}{kind.theory:>10}{power:>8.2f}{cells}", flush=True)
        rows.append({"kind": kind.name, "theory": kind.theory, "fitted": power, "lengths": lengths, "peaks": peaks})
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
        "heads": HEADS,
        "width": WIDTH,
        "max_distance": MAX_DISTANCE,
        "rows": rows,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
