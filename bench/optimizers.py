"""Measure the cost of LAMB and Muon over AdamW: torchrun --nproc-per-node 2 bench/optimizers.py

One engine per optimizer in the same processes, stepped in turn on the same batches. It prints the time of a whole
optimizer step (forward, backward, reduction, clipping, update, gathering of weights) and, within it, the time in the
optimizer's own step(), including LAMB's all-reduce and Muon's exchange of slices, whose bytes are counted. The
difference of whole steps includes noise of the machine; the difference of the times in step() hardly does, and its
ratio to a whole step is the cost.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from multihop.common.files import write_atomically
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks, join_process_group
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.objectives.batch import Batch, ModelInput
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

NAMES = ("adamw", "lamb", "muon")
MASK_RATE = 0.15


class Stopwatch:
    """Measures the seconds since the last reading, after the device has finished."""

    def __init__(self) -> None:
        self.lap()

    def lap(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        before, self._last = getattr(self, "_last", now), now
        return now - before


def make_engine(name: str, arguments: argparse.Namespace, ranks: Ranks) -> Engine:
    config = TrainingConfig.model_validate(
        {
            "model": {"preset": arguments.preset, "max_positions": max(512, arguments.seq_len)},
            "phases": [{"steps": 1, "seq_len": arguments.seq_len}],
            "optimizer": {"name": name},
            "engine": {"deepspeed": {}, "zero_stage": arguments.zero_stage, "precision": arguments.precision},
        }
    )
    model = build_model(config.model, arguments.vocab_size)
    init_weights(model, seed=1)
    return Engine(config, model.to(ranks.device), ranks, arguments.micro_batch)


def make_batch(generator: np.random.Generator, arguments: argparse.Namespace) -> Batch:
    """Return full sequences of random tokens: the cost of a step does not depend on their content."""
    samples, tokens = arguments.micro_batch, arguments.micro_batch * arguments.seq_len
    masked = np.sort(generator.choice(tokens, round(MASK_RATE * tokens), replace=False))
    targets = generator.integers(0, arguments.vocab_size, len(masked))
    input_ids = generator.integers(0, arguments.vocab_size, tokens)
    cu_seqlens = cumulative_lengths([arguments.seq_len] * samples)
    inputs: dict[str, ModelInput] = {
        "packed": pack(input_ids, cu_seqlens, np.zeros(tokens, np.int64)),
        "masked_positions": masked,
        "labels": targets,
        "is_random_next": generator.integers(0, 2, samples),
    }
    return Batch(inputs, targets, {"mlm": len(masked), "nsp": samples}, tokens)


def count_exchanged() -> list[int]:
    """Return a list that gets the bytes which this rank sends to others in each all-to-all from now on."""
    sent, exchange = [], dist.all_to_all_single

    def counted(output: Tensor, message: Tensor, *sizes: list[int], **named: Any) -> Any:
        sent.append(message.nbytes)
        return exchange(output, message, *sizes, **named)

    dist.all_to_all_single = counted
    return sent


def time_step(
    engine: Engine, batches: list[Batch], ranks: Ranks, own: list[float], sent: list[int]
) -> dict[str, float]:
    counts = {
        name: float(ranks.world_size * sum(batch.counts[name] for batch in batches)) for name in batches[0].counts
    }
    own.clear()
    sent.clear()
    dist.barrier()
    watch = Stopwatch()
    for batch in batches:
        engine.forward_backward(batch, counts)
    passes = watch.lap()
    engine.step(lr=1e-4)
    return {"whole": passes + watch.lap(), "passes": passes, "own": sum(own), "sent": float(sum(sent))}


def measure(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    own: list[float] = []
    sent = count_exchanged()
    watch = Stopwatch()

    def before(*_: object) -> None:
        watch.lap()

    def after(*_: object) -> None:
        own.append(watch.lap())

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    engines = {name: make_engine(name, arguments, ranks) for name in NAMES}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    generator = np.random.default_rng(ranks.rank)
    for repeat in range(1 + arguments.repeats):
        batches = [make_batch(generator, arguments) for _ in range(arguments.accumulation)]
        for name in NAMES if repeat % 2 else reversed(NAMES):  # none always runs first
            row = time_step(engines[name], batches, ranks, own, sent)
            if repeat > 0:  # the first allocates
                rows[name].append(row)
    median = {
        name: {part: statistics.median(row[part] for row in rows[name]) for part in ("whole", "passes", "own", "sent")}
        for name in NAMES
    }
    adamw, parameters = median["adamw"], sum(map(math.prod, engines["adamw"].parameters.values()))
    return {
        "date": date.today().isoformat(),
        "settings": vars(arguments) | {"json": str(arguments.json)},
        "machine": {
            "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else platform.machine(),
            "ranks": ranks.world_size,
            "threads_a_rank": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "deepspeed": version("deepspeed"),
        },
        "seconds": rows,
        "median_seconds": median,
        "parameters": parameters,
        "spread_of_adamw": _spread([row["whole"] for row in rows["adamw"]]),
        "cost": {
            name: {
                "own_ratio": median[name]["own"] / adamw["own"],
                "own_difference_of_a_step": (median[name]["own"] - adamw["own"]) / adamw["whole"],
                "whole_difference_of_a_step": median[name]["whole"] / adamw["whole"] - 1.0,
            }
            for name in NAMES[1:]
        },
    }


def _spread(values: list[float]) -> float:
    """Return half of the distance between the quartiles, as a share of the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def show(result: dict[str, Any]) -> None:
    settings, machine = result["settings"], result["machine"]
    samples = settings["micro_batch"] * settings["accumulation"] * machine["ranks"]
    print(
        f"{settings['preset']}, {samples} x {settings['seq_len']} tokens per step ({machine['ranks']} ranks x "
        f"{settings['accumulation']} micro-batches of {settings['micro_batch']}), ZeRO-{settings['zero_stage']}, "
        f"{settings['precision']}; {', '.join(f'{key} {value}' for key, value in machine.items())}"
    )
    print(f"medians of {settings['repeats']}    {'a step':>10} {'passes':>10} {'own':>10}")
    for name, median in result["median_seconds"].items():
        print(f"{name:<15} " + " ".join(f"{median[part]:>9.3f}s" for part in ("whole", "passes", "own")))
    for name, cost in result["cost"].items():
        print(
            f"{name}'s own step takes {cost['own_ratio']:.2f} times as long as AdamW's, which makes "
            f"{100 * cost['own_difference_of_a_step']:.2f} % of a step; whole steps differ by "
            f"{100 * cost['whole_difference_of_a_step']:+.2f} %, AdamW's from one another by "
            f"+-{100 * result['spread_of_adamw']:.2f} %"
        )
    # In a ring, a rank sends (n - 1) / n of the bytes when gradients are reduced, and again when weights are gathered.
    itemsize = 4 if settings["precision"] == "fp32" else 2
    passed_on = 2 * itemsize * result["parameters"] * (machine["ranks"] - 1) / machine["ranks"]
    exchanged = result["median_seconds"]["muon"]["sent"]
    print(
        f"rank 0 sends {exchanged / 1e6:,.0f} MB of slices a step for muon, and {passed_on / 1e6:,.0f} MB of gradients "
        "and weights in ZeRO-1 with any optimizer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bert-base")
    parser.add_argument("--vocab-size", type=int, default=30_522)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=8, help="samples a rank takes at once")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches a rank takes in a step")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each optimizer, after one that does not count")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--json", type=Path, default=Path("bench/results/optimizers.json"))
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    ranks = join_process_group(arguments.json.parent)
    result = measure(arguments, ranks)
    if ranks.rank == 0:
        show(result)
        write_atomically(arguments.json, json.dumps(result, indent=1).encode())
    ranks.shutdown()


if __name__ == "__main__":
    main()
