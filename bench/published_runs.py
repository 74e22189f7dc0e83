"""Predict published training runs of several systems with the constants of `multihop plan`; nothing is fitted to them.

    python bench/published_runs.py --out bench/published/runs_predicted.csv      # eight minutes of a busy core

Each row is predicted by the recipe of ours that is nearest, as `multihop plan` does, for both shares of the memory's
bandwidth: 0.7, measured for our own code on an H200, and 0.33, fitted to MPT's software (bench/published_speeds.py).
Differences are in ASSUMED. Sources were read on 2026-11-22 and 2026-11-25.
"""

import argparse
import csv
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

from multihop.common.gpus import USABLE, gpu_named
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.plan.collectives import links_of
from multihop.pretrain.plan.fit import Fit, RankPlan, Vocabularies
from multihop.pretrain.plan.step_time import Efficiency, step_time

SHARES = (0.7, 0.33)
BERT = {"model": {"preset": "bert-large"}, "objective": {"name": "mlm+nsp"}, "optimizer": {"name": "lamb"}}
NVIDIA = "DeepLearningExamples, PyTorch BERT"
TENSORFLOW = "DeepLearningExamples, TensorFlow BERT"
DEEPSPEED = "DeepSpeed, bert-pretraining tutorial"
LATER_DEEPSPEED = "DeepSpeed, training page"
TITAN = "torchtitan, benchmarks/llama3_h100_202412"
OLMO = "OLMo-core README"
NANOCHAT = "nanochat README"
TF32 = "DeepLearningExamples, PyTorch BERT, TF32"
ASSUMED = {
    NVIDIA: "micro-batches 256 and 32 on A100; on V100 the largest that fit; 400, 800 and 1,600 Gbit/s for a node of "
    "8 V100, 16 V100 and 8 A100",
    TENSORFLOW: "as the PyTorch runs",
    TF32: "matrix products at half of the rate of bf16, and the largest micro-batch that fits",
    NANOCHAT: "a GPT-2 of this size with 2^19 tokens a step: without its windows and squared ReLU; FLOPs as it counts "
    "them, with 2,048 tokens for each query",
    DEEPSPEED: "nodes of 16 V100 with 800 Gbit/s; the largest micro-batch that fits",
    LATER_DEEPSPEED: "the same",
    TITAN: "a ModernBERT decoder of this size: keys and values of all 32 heads instead of 8, GELU for SiLU; 3,200 "
    "Gbit/s between nodes",
    OLMO: "a ModernBERT decoder of this size; 64 H100 in ZeRO stage 3, selective checkpointing and the largest "
    "micro-batch that fits, none of which is published",
}


@dataclass(frozen=True)
class Published:
    """A published run."""

    name: str
    recipe: str
    """Key of RECIPES."""
    gpu: str
    gpus: int
    nodes: int
    network: float
    """Gbit/s between nodes."""
    measured: float
    unit: str
    """sequences/s or tokens/s of all GPUs, TFLOP/s (with activation checkpointing, or of the model alone) or tokens/s
    of a GPU, hours, or GB of a GPU's memory."""
    source: str
    micro_batch: int | None = None
    """None: the largest that fits."""


def bert(seq_len: int, batch: int) -> dict[str, Any]:
    return {**BERT, "phases": [{"seq_len": seq_len, "global_batch_size": batch, "steps": 1}], "engine": {}}


def decoder(
    layers: int, hidden: int, heads: int, inner: int, seq_len: int, batch: int, **engine: Any
) -> dict[str, Any]:
    return {
        "model": {
            **{"family": "modernbert-decoder", "layers": layers, "hidden": hidden, "heads": heads},
            **{"intermediate": inner, "max_positions": seq_len, "global_attn_every_n_layers": 1},
        },
        "objective": {"name": "clm"},
        "phases": [{"seq_len": seq_len, "global_batch_size": batch, "steps": 1}],
        "engine": {"zero_stage": 3, "activation_checkpointing": "selective", **engine},
    }


def gpt2(layers: int, hidden: int, heads: int, seq_len: int, batch: int, **engine: Any) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "max_positions": seq_len}
    return {
        "model": {"family": "gpt2", "dropout": 0.0, **sizes},
        "objective": {"name": "clm"},
        "phases": [{"seq_len": seq_len, "global_batch_size": batch, "steps": 1}],
        "engine": engine,
    }


RECIPES: dict[str, tuple[dict[str, Any], int]] = {  # and the size of the vocabulary
    "bert-128": (bert(128, 65_536), 30_528),
    "bert-512": (bert(512, 32_768), 30_528),
    "bert-128-16k": (bert(128, 16_384), 30_528),
    "bert-512-16k": (bert(512, 16_384), 30_528),
    "bert-128-tf32": ({**bert(128, 65_536), "engine": {"precision": "fp32"}}, 30_528),
    "bert-512-tf32": ({**bert(512, 32_768), "engine": {"precision": "fp32"}}, 30_528),
    "squad-384": (bert(384, 32), 30_528),
    "squad-384-8": (bert(384, 256), 30_528),
    "gpt-1.7b": (gpt2(24, 2304, 24, 2048, 512, activation_checkpointing="full"), 51_200),
    "gpt2-124m-12": (gpt2(12, 768, 12, 1024, 12), 50_304),
    "gpt2-124m-512": (gpt2(12, 768, 12, 1024, 512), 50_304),
    "gpt-d24": (gpt2(24, 1536, 12, 2048, 256), 32_768),
    "llama-8b-8": (decoder(32, 4096, 32, 14_336, 8192, 16), 128_256),
    "llama-8b-128": (decoder(32, 4096, 32, 14_336, 8192, 256), 128_256),
    "olmo-1b": (decoder(16, 2048, 16, 8192, 4096, 512), 100_352),
    "olmo-7b": (decoder(32, 4096, 32, 11_008, 4096, 512), 100_352),
    "olmo-13b": (decoder(40, 5120, 40, 13_824, 4096, 512), 100_352),
}


def both(
    source: str, gpu: str, gpus: int, nodes: int, network: float, speeds: tuple[float, float], **of: Any
) -> list[Published]:
    """A BERT-large at 128 and at 512 tokens."""
    runs = zip((128, 512), speeds, of.get("micro_batches", (None, None)), strict=True)
    where = gpu, gpus, nodes, network
    return [
        Published(f"BERT-large @ {length}", f"bert-{length}", *where, speed, "sequences/s", source, size)
        for length, speed, size in runs
    ]


A100 = {"micro_batches": (256, 32)}
ROWS = [
    *both(NVIDIA, "V100 16GB", 8, 1, 400, (919, 194.6)),
    *both(NVIDIA, "V100 32GB", 16, 1, 800, (3379, 625.7)),
    *both(NVIDIA, "V100 32GB", 256, 16, 800, (51_937, 9933)),
    *both(NVIDIA, "A100 80GB", 1, 1, 1600, (580, 210), **A100),
    *both(NVIDIA, "A100 80GB", 8, 1, 1600, (4591, 1657), **A100),
    *both(NVIDIA, "A100 80GB", 16, 2, 1600, (9191, 3291), **A100),
    *both(NVIDIA, "A100 80GB", 32, 4, 1600, (18_119, 6464), **A100),
    *both(NVIDIA, "A100 80GB", 128, 16, 1600, (70_555, 25_570), **A100),
    Published("BERT-large, SQuAD @ 384", "squad-384", "A100 80GB", 1, 1, 1600, 110.5, "sequences/s", NVIDIA, 32),
    Published("BERT-large, SQuAD @ 384", "squad-384-8", "A100 80GB", 8, 1, 1600, 846.7, "sequences/s", NVIDIA, 32),
    *(
        Published(
            f"BERT-large @ {length}", f"bert-{length}-tf32", "A100 80GB", gpus, 1, 1600, speed, "sequences/s", TF32
        )
        for gpus, length, speed in ((1, 128, 317), (1, 512, 110), (8, 128, 2505), (8, 512, 860))
    ),
    *both(TENSORFLOW, "A100 40GB", 8, 1, 1600, (2872, 572)),
    *both(TENSORFLOW, "V100 16GB", 8, 1, 400, (1001, 191)),
    *both(TENSORFLOW, "V100 32GB", 8, 1, 400, (1443, 256)),
    *(
        Published("BERT-large, 16K", "hours", "V100 32GB", gpus, gpus // 16, 800, hours, "hours", source)
        for source, gpus, hours in (
            *((DEEPSPEED, 64, 14.0), (DEEPSPEED, 256, 3.7)),
            *((LATER_DEEPSPEED, 16, 33.22), (LATER_DEEPSPEED, 64, 8.68)),
            *((LATER_DEEPSPEED, 256, 2.4), (LATER_DEEPSPEED, 1024, 44 / 60)),
        )
    ),
    Published(
        "GPT 1.7B", "gpt-1.7b", "A100 80GB", 32, 4, 1600, 137, "TFLOP/s a GPU", "Narayanan et al. 2021, table 1", 16
    ),
    *(
        Published(name, "gpt2-124m-12", "A100 40GB", 1, 1, 1600, 12 * 1024 / took, "tokens/s", "nanoGPT README", 12)
        for name, took in (("GPT-2 124M, compiled", 0.135), ("GPT-2 124M", 0.25))
    ),
    Published("GPT d24", "gpt-d24", "H100", 8, 1, 3200, 4.33e19 / 10_949 / 8e12, "model TFLOP/s a GPU", NANOCHAT, 32),
    Published(
        "GPT-2 124M", "gpt2-124m-512", "H100", 8, 1, 3200, 10e9 / (45 * 60), "tokens/s", "modded-nanogpt README", 64
    ),
    *(
        Published(f"Llama 8B @ 8,192{how}", f"llama-8b-{gpus}", "H100", gpus, gpus // 8, 3200, value, unit, TITAN, 2)
        for gpus, how, speed, gib in (
            *((8, "", 5762, 82.4), (128, "", 5605, 67.0)),
            *((8, ", compiled", 6667, 77.0), (128, ", compiled", 6514, 62.0)),
        )
        for value, unit in ((speed, "tokens/s a GPU"), (gib * 2**30 / 1e9, "GB a GPU"))
    ),
    *(
        Published(f"OLMo {size}", f"olmo-{size}", "H100", 64, 8, 3200, speed, "tokens/s a GPU", OLMO)
        for size, speed in (("1b", 44_000), ("7b", 10_000), ("13b", 4_600))
    ),
]  # fmt: skip
_HOURS = (("bert-128-16k", 402.7e6), ("bert-512-16k", 34.5e6))
"""Recipe and samples of the phases of DeepSpeed's BERT."""


@cache
def planned(recipe: str, gpu: str, gpus: int, micro_batch: int | None) -> tuple[RankPlan, Fit]:
    content, vocabulary = RECIPES[recipe]
    kind = gpu_named(gpu)
    assert kind is not None
    content = {
        **content,
        "seed": 1,
        "engine": {"zero_stage": 1, "precision": "bf16", "deepspeed": {}, **content["engine"]},
    }
    content["engine"]["micro_batch_size"] = micro_batch or "auto"
    plan = RankPlan(TrainingConfig.model_validate(content), 0, gpus, Vocabularies(vocabulary))
    fit = plan.largest(USABLE * kind.memory if micro_batch is None else math.inf)
    if not fit.micro_batch_size:
        raise SystemExit(f"{recipe} on {gpu}: not one sample fits")
    return plan, fit


def seconds(row: Published, recipe: str, memory_share: float) -> tuple[float, RankPlan, Fit]:
    """Predicted seconds of a step."""
    plan, fit = planned(recipe, row.gpu, row.gpus, row.micro_batch)
    kind = gpu_named(row.gpu)
    assert kind is not None
    if plan.config.engine.precision == "fp32":  # computed in TF32
        kind = replace(kind, fp32_flops=kind.achievable_flops / 2)
    links = links_of(kind, row.gpus, row.nodes, row.network)
    count = math.ceil(plan.share / fit.samples)
    # Their software overlaps the exchange of gradients with the backward pass, as FSDP and DistributedDataParallel do.
    efficiency = Efficiency(memory=memory_share)
    return step_time(fit.trace, count, fit.step_tokens / fit.batch.tokens, kind, links, efficiency)[0], plan, fit


def predicted(row: Published, memory_share: float) -> tuple[float, int, int]:
    """The value in the row's unit, the micro-batch and its bytes."""
    if row.unit == "hours":
        hours = 0.0
        for recipe, samples in _HOURS:
            took, plan, fit = seconds(row, recipe, memory_share)
            hours += samples / plan.config.phases[0].global_batch_size * took / 3600
        return hours, fit.samples, fit.trace.peak
    took, plan, fit = seconds(row, row.recipe, memory_share)
    phase = plan.config.phases[0]
    tokens = phase.global_batch_size * phase.seq_len / took
    sizes = plan.config.model, phase.seq_len, plan.vocabularies.output
    match row.unit:
        case "sequences/s":
            value = phase.global_batch_size / took
        case "tokens/s":
            value = tokens
        case "tokens/s a GPU":
            value = tokens / row.gpus
        case "TFLOP/s a GPU":
            value = tokens / row.gpus * _megatron_flops(*sizes) / 1e12
        case "model TFLOP/s a GPU":
            value = tokens / row.gpus * _nanochat_flops(*sizes) / 1e12
        case "GB a GPU":
            value = fit.trace.peak / 1e9
        case _:
            raise AssertionError(row.unit)
    return value, fit.samples, fit.trace.peak


def _megatron_flops(model: Any, seq_len: int, vocabulary: int) -> float:
    """Of a token, with full activation checkpointing (Narayanan et al. 2021, equation 3)."""
    layers, hidden = model.layers, model.hidden
    return 96 * layers * hidden**2 * (1 + seq_len / (6 * hidden) + vocabulary / (16 * layers * hidden))


def _nanochat_flops(model: Any, seq_len: int, vocabulary: int) -> float:
    """Of a token, as nanochat estimates them: 6 for each weight of a matrix product, and 12 for each query's keys."""
    layers, hidden = model.layers, model.hidden
    return 6 * (12 * layers * hidden**2 + vocabulary * hidden) + 12 * layers * hidden * seq_len


def speed_ratio(row: Published, value: float) -> float:
    """Predicted over published, of hours published over predicted: above 1 is too fast."""
    return row.measured / value if row.unit == "hours" else value / row.measured


def show(rows: Iterable[Published], out: Path) -> None:
    columns = (
        "run",
        "GPUs",
        "nodes",
        "unit",
        "published",
        "micro-batch",
        "memory, GB",
        *(f"ratio, {share}" for share in SHARES),
    )
    print("|", " | ".join(columns), "| source |\n" + "|---" * (len(columns) + 1) + "|")
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "source", "assumed"])
        for row in rows:
            found = [predicted(row, share) for share in SHARES]
            _, samples, peak = found[0]
            ratios = [f"{speed_ratio(row, value):.2f}" for value, *_ in found]
            cells = [row.name, f"{row.gpus} {row.gpu}", row.nodes, row.unit, f"{row.measured:,.4g}", samples]
            cells += [f"{peak / 1e9:.1f}", *ratios, row.source]
            writer.writerow([*cells, ASSUMED.get(row.source, "")])
            file.flush()
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "published" / "runs_predicted.csv")
    parser.add_argument("--only", default="", help="a part of the names of the runs")
    arguments = parser.parse_args()
    show([row for row in ROWS if arguments.only in row.name], arguments.out)


if __name__ == "__main__":
    main()
