"""Measure the cost of a layer against sequence length n and width d, next to table 1 of Vaswani et al. 2017.

    python bench/layer_costs.py --picture docs/layer-costs.png

One sequence, fp32, forward and backward. A cost is fitted as a power of n, and of d, over the larger half of the sizes,
where the highest power dominates: the slope of log(cost) against log(size). The attention is that of the paper's table:
scores and weighted sum, without the four projections, which cost as much as a convolution with k = 4. `kept` is what
autograd keeps for the backward pass.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.layers.attention import Sequences, attend

KERNEL = 3
WINDOW = 128
Layer = Callable[[Tensor], Tensor]
"""Maps a tensor (n, d) to a tensor (n, d)."""


@dataclass(frozen=True)
class Kind:
    """A kind of layer, and what the paper's table says about it."""

    name: str
    make: Callable[[int], Layer]
    """Makes a layer of width d."""
    time: tuple[int, int]
    """Powers of n and d in the computing time."""
    kept: tuple[int, int]
    """Powers of n and d in the bytes that are kept for the backward pass."""
    sequential: str
    path: str
    """Maximum path length between two positions, in layers."""


def attention_with_scores(d: int) -> Layer:
    def layer(x: Tensor) -> Tensor:
        return (x @ x.T * d**-0.5).softmax(-1) @ x

    return layer


def fused_attention(d: int) -> Layer:
    return lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


def window_attention(d: int, dropout: float = 0.0) -> Layer:
    """Return our attention of ModernBERT's local layers: a token attends to those at most half the window away."""

    def layer(x: Tensor) -> Tensor:
        head = x[:, None]
        sequences = Sequences(torch.tensor([0, len(x)]), len(x), len(x))
        return attend(head, head, head, sequences, causal=False, dropout=dropout, window=WINDOW // 2)[:, 0]

    return layer


def recurrence(d: int) -> Layer:
    lstm = nn.LSTM(d, d)
    return lambda x: lstm(x)[0]


def convolution(d: int) -> Layer:
    conv = nn.Conv1d(d, d, KERNEL, padding=KERNEL // 2)
    return lambda x: conv(x.T[None])[0].T


KINDS = (
    Kind("self-attention, scores kept", attention_with_scores, (2, 1), (2, 0), "1", "1"),
    Kind("self-attention, fused", fused_attention, (2, 1), (1, 1), "1", "1"),
    Kind(f"self-attention, window of {WINDOW}", window_attention, (1, 1), (1, 1), "1", f"n / {WINDOW // 2}"),
    Kind("the same with dropout", partial(window_attention, dropout=0.1), (1, 1), (1, 1), "1", f"n / {WINDOW // 2}"),
    Kind("recurrent (LSTM)", recurrence, (1, 2), (1, 1), "n", "n"),
    Kind(f"convolution, k = {KERNEL}", convolution, (1, 2), (1, 1), "1", "n / k"),
)


def seconds(layer: Layer, n: int, d: int, repeats: int) -> float:
    """Return the median seconds of a forward and backward pass, after one that warms up."""
    x = torch.randn(n, d, requires_grad=True)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        layer(x).sum().backward()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def kept_bytes(layer: Layer, n: int, d: int) -> int:
    """Return the bytes kept for the backward pass besides the input and the weights, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(n, d, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(x)
    weights = _weights(layer)
    for tensor in (x, *weights):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values()) + out.untyped_storage().nbytes()


def _weights(layer: Layer) -> list[Tensor]:
    cells = [cell.cell_contents for cell in getattr(layer, "__closure__", None) or ()]
    return [weight for each in cells if isinstance(each, nn.Module) for weight in each.parameters()]


def layers_to_connect(kind: Kind, n: int, d: int = 8) -> int:
    """Return the number of such layers until the last position depends on the first."""
    layer, count = kind.make(d), 0
    x = first = torch.randn(n, d, requires_grad=True)
    while True:
        x, count = layer(x), count + 1
        (gradient,) = torch.autograd.grad(x[-1].sum(), first, retain_graph=True)
        if gradient[0].any():
            return count


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Return the slope of log(cost) against log(size) over the larger half of the sizes."""
    half = len(sizes) // 2
    return float(np.polyfit(np.log(sizes[half:]), np.log(costs[half:]), 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--width", type=int, default=64, help="where n varies (default: %(default)s)")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--length", type=int, default=256, help="where d varies (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=Path("bench/results/layer_costs.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)

    of_n = [(n, arguments.width) for n in arguments.lengths]
    of_d = [(arguments.length, d) for d in arguments.widths]
    measured: dict[str, dict[str, list[float]]] = {kind.name: {} for kind in KINDS}
    for axis, sizes in (("n", of_n), ("d", of_d)):
        for kind in KINDS:
            layers = [kind.make(d) for _, d in sizes]
            pairs = list(zip(layers, sizes, strict=True))
            measured[kind.name][f"seconds of {axis}"] = [seconds(each, *at, arguments.repeats) for each, at in pairs]
            measured[kind.name][f"kept of {axis}"] = [float(kept_bytes(each, *at)) for each, at in pairs]

    print(f"torch {torch.__version__}, {arguments.threads} threads; n at d = {arguments.width}: {arguments.lengths}")
    print(f"d at n = {arguments.length}: {arguments.widths}; powers: theory -> fitted")
    print(f"{'':30} {'time of n':>12} {'time of d':>12} {'kept of n':>12} {'kept of d':>12}  sequential  path  layers")
    fitted = {}
    for kind in KINDS:
        powers = {
            f"{cost} of {axis}": exponent(sizes, measured[kind.name][f"{cost} of {axis}"])
            for cost in ("seconds", "kept")
            for axis, sizes in (("n", arguments.lengths), ("d", arguments.widths))
        }
        theory = dict(zip(powers, (*kind.time, *kind.kept), strict=True))
        connecting = layers_to_connect(kind, 33)
        cells = " ".join(f"{theory[name]:>4} -> {power:.2f}" for name, power in powers.items())
        print(f"{kind.name:30} {cells}  {kind.sequential:>10} {kind.path:>5} {connecting:>7}", flush=True)
        fitted[kind.name] = {"theory": theory, "fitted": powers, "layers that connect 33 positions": connecting}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "torch": torch.__version__,
        "threads": arguments.threads,
        "lengths": of_n,
        "widths": of_d,
        "measured": measured,
        "powers": fitted,
    }
    arguments.json.write_text(json.dumps(report, indent=1))
    if arguments.picture is not None:
        draw(arguments.picture, arguments.lengths, arguments.widths, measured, fitted)


def draw(
    path: Path,
    lengths: list[int],
    widths: list[int],
    measured: dict[str, dict[str, list[float]]],
    fitted: dict[str, dict[str, dict[str, float]]],
) -> None:
    """Draw four panels on logarithmic axes: seconds and kept bytes against n and d, with each line's fitted power."""
    from matplotlib.figure import Figure

    from multihop.eval.report.plot_style import PAPER, as_png, style

    figure = Figure(figsize=(10, 7), layout="constrained")
    rows = (("seconds", "seconds, forward and backward"), ("kept", "bytes kept for the backward pass"))
    for panels, (cost, title) in zip(figure.subplots(2, 2), rows, strict=True):
        for axes, (axis, sizes) in zip(panels, (("n", lengths), ("d", widths)), strict=True):
            for color, kind in zip(PAPER.series, KINDS, strict=False):
                name = f"{cost} of {axis}"
                label = f"{kind.name}: {axis}^{fitted[kind.name]['fitted'][name]:.2f}"
                axes.loglog(sizes, measured[kind.name][name], "o-", color=color, markersize=3, label=label)
            style(axes, PAPER)
            axes.set_xscale("log", base=2)
            axes.set_ylabel(title, fontsize=9)
            axes.set_xlabel("sequence length n" if axis == "n" else "width d", fontsize=9)
            axes.legend(fontsize=8, frameon=False)
    path.write_bytes(as_png(figure))


if __name__ == "__main__":
    main()
