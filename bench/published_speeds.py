"""Predict the speed of published training runs, and fit the efficiencies of `multihop plan` to half of them.

    python bench/published_speeds.py trace --out traces.json      # the operations of each run; about 8 s each
    python bench/published_speeds.py fit traces.json              # the constants, and the errors of both halves

The rows of bench/published/mpt.csv are of MPT under FSDP, which shards as ZeRO stage 3 does
(https://github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md, read 2026-11-28). A row belongs to the
half that is fitted if the first hexadecimal digit of the SHA-256 of its text is even. Models are traced with two and
four layers, and what two layers add is multiplied: all layers are alike.
"""

import argparse
import csv
import hashlib
import json
import os
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

import numpy as np
import torch
from scipy.optimize import minimize

from multihop.common.gpus import Gpu, gpu_named
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.operations import Operation
from multihop.pretrain.plan.rank_trace import trace_rank
from multihop.pretrain.plan.step_time import Efficiency, StepTime, time_of

ROWS = Path(__file__).parent / "published" / "mpt.csv"
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
NODE_BYTES_PER_S = {"A100": 1600e9 / 8, "H100": 3200e9 / 8}
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


def tokens_per_s(entry: dict[str, Any], efficiency: Efficiency) -> float:
    """The predicted tokens per second and GPU."""
    row, parts = entry["row"], entry["parts"]
    gpu, gpus = kind_of(row), int(row["gpus"])
    sent = gpu.link if gpus <= 8 else min(gpu.link, NODE_BYTES_PER_S[row["gpu"][:4]])
    layers = SIZES[row["model"]][0]

    def seconds(part: str) -> float:
        two, four = (
            np.array(astuple(time_of(operations_of(parts[key][part], part, gpus), gpu, sent, efficiency)))
            for key in ("2", "4")
        )
        return StepTime(*(two + (four - two) * (layers - 2) / 2).tolist()).total

    count = int(row["micro_batches"])
    step = count * seconds("micro_batch") + seconds("update")
    return count * int(row["micro_batch_size"]) * int(row["seq_len"]) / step


def is_fitted(row: dict[str, str]) -> bool:
    return int(hashlib.sha256(",".join(row.values()).encode()).hexdigest()[0], 16) % 2 == 0


def fit(entries: list[dict[str, Any]]) -> Efficiency:
    """The constants with the smallest mean absolute error of the logarithm on the rows that are fitted."""
    chosen = [entry for entry in entries if is_fitted(entry["row"])]

    def efficiency_of(x: np.ndarray) -> Efficiency:
        shares = 1 / (1 + np.exp(-x[:5]))
        return Efficiency(*shares.tolist(), launch_s=float(np.exp(x[5])))

    def error(x: np.ndarray) -> float:
        ratios = [
            tokens_per_s(entry, efficiency_of(x)) / float(entry["row"]["tokens_per_s_per_gpu"]) for entry in chosen
        ]
        return float(np.abs(np.log(ratios)).mean())

    start = np.array([2.0, 0.2, 1.4, 1.4, 1.0, np.log(5e-6)])
    found = minimize(error, start, method="Nelder-Mead", options={"maxiter": 400, "xatol": 1e-2, "fatol": 1e-4})
    return efficiency_of(found.x)


def show(entries: list[dict[str, Any]], efficiency: Efficiency) -> None:
    print(efficiency)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for entry in entries:
        row, predicted = entry["row"], tokens_per_s(entry, efficiency)
        ratio = predicted / float(row["tokens_per_s_per_gpu"])
        errors[is_fitted(row)].append(abs(ratio - 1))
        print(",".join(row.values()), f"{predicted:.0f}", f"{ratio:.3f}", "fitted" if is_fitted(row) else "")
    for fitted, found in errors.items():
        name = "fitted" if fitted else "not fitted"
        print(f"{name}: {len(found)} rows, median error {np.median(found):.1%}, largest {max(found):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("trace").add_argument("--out", type=Path, required=True)
    commands.add_parser("fit").add_argument("traces", type=Path)
    commands.add_parser("show").add_argument("traces", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "trace":
        trace(arguments.out)
        return
    entries = json.loads(arguments.traces.read_text())
    show(entries, fit(entries) if arguments.command == "fit" else Efficiency())


if __name__ == "__main__":
    main()
