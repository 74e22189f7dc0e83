"""Predict the speed of published training runs, and fit the efficiencies of `multihop plan` to half of them.

    python bench/published_speeds.py trace --out traces.json      # the operations of each run; about 8 s each
    python bench/published_speeds.py fit traces.json              # the constants, and the errors of both halves

The rows of bench/published/mpt.csv are of MPT under FSDP, which shards as ZeRO stage 3 does
(https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md, read 2026-11-28). A row belongs to the
half that is fitted if the first hexadecimal digit of the SHA-256 of its text is even. Four constants are fitted, of
which `multihop plan` has all but the share of the memory's bandwidth: MPT's software moves more bytes than ours. Models
are traced with two and four layers, and what two layers add is multiplied: all layers are alike.
"""

import argparse
import csv
import hashlib
import json
import math
import os
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

import numpy as np
import torch
from scipy.optimize import minimize

from multihop.common.gpus import Gpu, gpu_named
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.collectives import links_of
from multihop.pretrain.plan.operations import Operation
from multihop.pretrain.plan.rank_trace import trace_rank
from multihop.pretrain.plan.step_time import Efficiency, StepTime, time_of

ROWS = Path(__file__).parent / "published" / "mpt.csv"
PREDICTED = ROWS.with_name("mpt_predicted.csv")
KINDS = ("A100-40GB", "A100-80GB", "H100")
_FAR = 0.2
"""Rows with a larger error are printed."""
SIZES = {  # layers, hidden, heads (llm-foundry, scripts/train/yamls/pretrain)
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
VOCABULARY = 50_368
NETWORK_GBIT = {"A100": 1600.0, "H100": 3200.0}
"""Between nodes of 8 GPUs. A100: as published; H100: not published, the usual 400 Gbit/s for each GPU."""
ALWAYS_RELEASED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
"""Weights are gathered for the forward pass and again for the backward pass, as under FSDP; DeepSpeed would keep those
of the few layers that are traced."""
Counted = list[tuple[list[Any], int]]
"""Operations as lists of their fields, and how often each occurs."""


def config_of(row: dict[str, str], layers: int) -> TrainingConfig:
    _, hidden, heads = SIZES[row["model"]]
    seq_len, micro_batch = int(row["seq_len"]), int(row["micro_batch_size"])
    model = {"family": "gpt2", "layers": layers, "hidden": hidden, "heads": heads, "max_positions": seq_len}
    return TrainingConfig.model_validate(
        {
            "seed": 1,
            "model": {**model, "dropout": 0.0},
            "objective": {"name": "clm"},
            "phases": [{"seq_len": seq_len, "global_batch_size": micro_batch * int(row["gpus"]), "steps": 1}],
            "engine": {
                "micro_batch_size": micro_batch,
                "precision": "bf16",
                "zero_stage": 3,
                "activation_checkpointing": row["activation_checkpointing"],
                "deepspeed": {"zero_optimization": ALWAYS_RELEASED},
            },
        }
    )


def share(kind: str, part: str, gpus: int) -> float:
    """The part of all ranks' bytes that an operation of a rank has: the update is of its shard alone."""
    if kind == "communication":
        return 1 - 1 / gpus
    return 1 / gpus if part == "update" else 1.0


def counted(operations: Counter[Operation], part: str, gpus: int) -> Counted:
    """Operations with the bytes of all ranks, and how often each occurs."""
    return [
        (
            [each.kind, each.name, each.flops, each.bytes / share(each.kind, part, gpus), str(each.dtype), each.shape],
            count,
        )
        for each, count in operations.items()
    ]


def operations_of(counts: Counted, part: str, gpus: int) -> Counter[Operation]:
    found: Counter[Operation] = Counter()
    for (kind, name, flops, size, dtype, shape), count in counts:
        own = round(size * share(kind, part, gpus))
        found[Operation(kind, name, flops, own, getattr(torch, dtype.removeprefix("torch.")), tuple(shape))] += count
    return found


def trace(out: Path) -> None:
    """Trace each model, length, micro-batch and kind of activation checkpointing once; GPUs change what is sent."""
    found, traces = [], {}
    for row in csv.DictReader(ROWS.open()):
        key = row["model"], row["seq_len"], row["micro_batch_size"], row["activation_checkpointing"]
        if key not in traces:
            traces[key] = {str(layers): _trace(row, layers) for layers in (2, 4)}
            print(row, flush=True)
        found.append({"row": row, "parts": traces[key]})
        out.write_text(json.dumps(found))


def _trace(row: dict[str, str], layers: int) -> dict[str, Counted]:
    config, micro_batch, gpus = config_of(row, layers), int(row["micro_batch_size"]), int(row["gpus"])
    batch = assumed_batch(config, 0, micro_batch, VOCABULARY)
    traced = trace_rank(config, VOCABULARY, None, [batch], micro_batch, gpus)
    parts = {"micro_batch": traced.micro_batches[0], "update": traced.update}
    return {part: counted(operations, part, gpus) for part, operations in parts.items()}


def kind_of(row: dict[str, str]) -> Gpu:
    found = gpu_named(row["gpu"])
    assert found is not None
    return found


@dataclass(frozen=True)
class Traced:
    """A published row with the operations of two and of four layers."""

    row: dict[str, str]
    two: dict[str, Counter[Operation]]
    four: dict[str, Counter[Operation]]


def read(entry: dict[str, Any]) -> Traced:
    gpus = int(entry["row"]["gpus"])
    two, four = (
        {part: operations_of(counts, part, gpus) for part, counts in entry["parts"][layers].items()}
        for layers in ("2", "4")
    )
    return Traced(entry["row"], two, four)


def tokens_per_s(traced: Traced, efficiency: Efficiency) -> float:
    """The predicted tokens per second and GPU."""
    row = traced.row
    gpu, gpus = kind_of(row), int(row["gpus"])
    links = links_of(gpu, gpus, math.ceil(gpus / 8), NETWORK_GBIT[row["gpu"][:4]])
    layers = SIZES[row["model"]][0]

    def seconds(part: str) -> float:
        two, four = (
            np.array(astuple(time_of(operations[part], gpu, links, efficiency)))
            for operations in (traced.two, traced.four)
        )
        return StepTime(*(two + (four - two) * (layers - 2) / 2).tolist()).total

    count = int(row["micro_batches"])
    step = count * seconds("micro_batch") + seconds("update")
    return count * int(row["micro_batch_size"]) * int(row["seq_len"]) / step


def ratio(traced: Traced, efficiency: Efficiency) -> float:
    """The predicted speed as a share of the published one."""
    return tokens_per_s(traced, efficiency) / float(traced.row["tokens_per_s_per_gpu"])


def is_fitted(row: dict[str, str]) -> bool:
    return int(hashlib.sha256(",".join(row.values()).encode()).hexdigest()[0], 16) % 2 == 0


def fit(rows: list[Traced]) -> Efficiency:
    """The constants with the smallest mean absolute error of the logarithm on the rows that are fitted."""
    chosen = [each for each in rows if is_fitted(each.row)]

    def efficiency_of(x: np.ndarray) -> Efficiency:
        products, attention, memory, overlap = (1 / (1 + np.exp(-x))).tolist()
        return Efficiency(products, attention, memory, overlap=overlap)

    def error(x: np.ndarray) -> float:
        return float(np.mean([abs(math.log(ratio(each, efficiency_of(x)))) for each in chosen]))

    options = {"maxiter": 400, "xatol": 1e-3, "fatol": 1e-6}
    starts = [np.array([products, 0.0, memory, 1.0]) for products in (2.0, 4.0) for memory in (-0.5, 0.5)]
    found = [minimize(error, start, method="Nelder-Mead", options=options) for start in starts]
    return efficiency_of(min(found, key=lambda each: each.fun).x)


def show(rows: list[Traced], efficiency: Efficiency, out: Path) -> None:
    """Print the errors of both halves and the rows that are far off, and write all rows."""
    print(efficiency)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*rows[0].row, "predicted", "predicted_over_published", "is_fitted"])
        for each in rows:
            writer.writerow(
                [
                    *each.row.values(),
                    f"{tokens_per_s(each, efficiency):.0f}",
                    f"{ratio(each, efficiency):.3f}",
                    int(is_fitted(each.row)),
                ]
            )
    for fitted in (True, False):
        errors = np.array([abs(ratio(each, efficiency) - 1) for each in rows if is_fitted(each.row) == fitted])
        print(
            f"{'fitted' if fitted else 'not fitted'}: {len(errors)} rows, median error {np.median(errors):.1%}, "
            f"90 % within {np.quantile(errors, 0.9):.1%}, largest {errors.max():.1%}"
        )
    for each in rows:
        if abs(ratio(each, efficiency) - 1) > _FAR:
            print(*each.row.values(), f"{ratio(each, efficiency):.2f}", "fitted" if is_fitted(each.row) else "")
    print("| model |", " | ".join(KINDS), "|\n|---" + "|---" * len(KINDS), "|")
    for model in SIZES:
        of_model = [each for each in rows if each.row["model"] == model]
        cells = ([ratio(each, efficiency) for each in of_model if each.row["gpu"] == kind] for kind in KINDS)
        print(
            f"| {model} |",
            " | ".join(f"{np.median(cell):.2f} ({min(cell):.2f} to {max(cell):.2f})" if cell else "" for cell in cells),
            "|",
        )


def draw(rows: list[Traced], efficiency: Efficiency, out: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    for kind, marker in zip(KINDS, "os^", strict=True):
        for fitted in (False, True):
            chosen = [each for each in rows if each.row["gpu"] == kind and is_fitted(each.row) == fitted]
            axes.scatter(
                [float(each.row["tokens_per_s_per_gpu"]) for each in chosen],
                [ratio(each, efficiency) for each in chosen],
                marker=marker,
                facecolors="none" if fitted else None,
                edgecolors="grey" if fitted else None,
                label=kind + (", fitted" if fitted else ""),
            )
    for level, style in ((1.0, "-"), (1 - _FAR, ":"), (1 + _FAR, ":")):
        axes.axhline(level, color="black", linewidth=0.8, linestyle=style)
    axes.set(xscale="log", xlabel="published tokens/s of a GPU", ylabel="predicted / published")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("trace").add_argument("--out", type=Path, required=True)
    fitting = commands.add_parser("fit")
    fitting.add_argument("traces", type=Path)
    fitting.add_argument("--out", type=Path, default=PREDICTED)
    fitting.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "trace":
        trace(arguments.out)
        return
    rows = [read(entry) for entry in json.loads(arguments.traces.read_text())]
    efficiency = fit(rows)
    show(rows, efficiency, arguments.out)
    if arguments.picture is not None:
        draw(rows, efficiency, arguments.picture)


if __name__ == "__main__":
    main()
