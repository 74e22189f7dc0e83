"""The memory that is planned, beside what the real engine takes on ranks over gloo, as torch counts tensors."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from covering import short_and_long
from kinds_of_families import model_section
from memory_jobs import bytes_of_steps
from rank_pool import RankPool
from tables_of_tests import Table

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.fit import RankPlan, Vocabularies
from multihop.pretrain.plan.rank_trace import RankTrace, trace_rank

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
VOCABULARY, SAMPLES = 1000, 4
BOUND = 0.05
"""Largest relative difference of the planned bytes."""
CASES = [
    ("bert", 1, 0, "fp32", "none", "lamb", "none"),
    ("modernbert", 2, 1, "bf16", "none", "muon", "none"),
    ("gpt2", 2, 2, "bf16", "optimizer", "adamw", "selective"),
    ("albert", 2, 2, "fp16", "none", "lamb", "full"),
    ("gpt2", 2, 3, "bf16", "none", "adamw", "none"),
    ("roberta", 2, 3, "fp32", "optimizer+weights", "adamw", "full"),
]
"""Family, world size, ZeRO stage, precision, offload, optimizer, activation checkpointing."""
MORE_CASES = [
    ("xlnet", 1, 2, "bf16", "none", "adamw", "none"),
    ("transformer", 2, 1, "fp32", "none", "adamw", "none"),
    ("modernbert-decoder", 2, 2, "bf16", "none", "adamw", "full"),
    ("ctc-encoder", 1, 1, "fp32", "none", "adamw", "none"),
    ("ctc-encoder", 2, 1, "bf16", "none", "adamw", "none"),
    ("gpt2", 1, 1, "bf16", "none", "adamw", "none"),
]


def settings(
    family: str, stage: int, precision: str, offload: str, optimizer: str, checkpointing: str, seq_len: int = 64
) -> dict[str, Any]:
    recurrent = FAMILIES[family].uses_ctc  # its encoder is an LSTM unless the recipe says otherwise
    return {
        "seed": 3,
        "model": model_section(family, layers=2, hidden=64, max_positions=128, **({} if recurrent else {"heads": 4})),
        "objective": {"name": FAMILIES[family].default_objective},
        "phases": [{"seq_len": seq_len, "global_batch_size": 64, "steps": 9, "lr": 1e-2}],
        "optimizer": {"name": optimizer},
        "engine": {
            "deepspeed": {},
            "micro_batch_size": SAMPLES,
            "precision": precision,
            "zero_stage": stage,
            "offload": offload,
            "activation_checkpointing": checkpointing,
        },
    }


def planned(content: dict[str, Any], world_size: int) -> RankTrace:
    config = TrainingConfig.model_validate(content)
    batches = [assumed_batch(config, 0, SAMPLES, VOCABULARY) for _ in range(2)]
    return trace_rank(config, VOCABULARY, None, batches, SAMPLES, world_size, "cpu")


@pytest.fixture(autouse=True)
def same_linear() -> Iterator[None]:
    """DeepSpeed replaces torch's function in ZeRO stage 3, for the whole process."""
    linear = torch.nn.functional.linear
    yield
    torch.nn.functional.linear = linear


@pytest.mark.parametrize(
    ("family", "world_size", "stage", "precision", "offload", "optimizer", "checkpointing"),
    short_and_long(CASES, MORE_CASES),
)
def test_it_is_what_the_engine_takes(
    family: str,
    world_size: int,
    stage: int,
    precision: str,
    offload: str,
    optimizer: str,
    checkpointing: str,
    pool: Callable[[int], RankPool],
    request: pytest.FixtureRequest,
    table: Table,
) -> None:
    content = settings(family, stage, precision, offload, optimizer, checkpointing)
    real = pool(world_size).run(bytes_of_steps, content, VOCABULARY, SAMPLES, 2)[0]
    trace = planned(content, world_size)
    ours = {"between": trace.between_steps, **trace.peaks}
    ratios = {name: sum(ours[name].values()) / size for name, size in real.items()}
    table(f"{request.node.callspec.id}: " + ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in ratios.items()))
    assert all(abs(ratio - 1) <= BOUND for ratio in ratios.values()), ratios


def test_more_ranks_hold_less_of_what_is_partitioned() -> None:
    def between(stage: int, ranks: int) -> int:
        return planned(settings("gpt2", stage, "bf16", "none", "adamw", "none"), ranks).between_steps["device"]

    whole = between(1, 1)
    assert between(1, 256) < between(1, 8) < 0.4 * whole and between(2, 8) == between(1, 8)


@pytest.mark.long
def test_the_largest_micro_batch_is_within_the_limit_and_at_most_one_sample_too_small() -> None:
    content = settings("gpt2", 1, "bf16", "none", "adamw", "none")
    content["engine"]["micro_batch_size"] = "auto"
    config = TrainingConfig.model_validate(content)
    plan = RankPlan(config, 0, 2, Vocabularies(VOCABULARY))
    for samples in (1, 7):
        limit = plan.trace(plan.micro_batch(samples)[0], samples).peak
        found = plan.largest(limit)
        assert found.trace.peak <= limit and found.micro_batches <= math.ceil(plan.share / max(1, samples - 1))
    assert plan.largest(1e12).micro_batch_size == plan.share == 32
    assert plan.largest(1e3).micro_batch_size == 0  # ends, although no number of samples fits
    assert plan._fit(1, 1e3).micro_batch_size == 0
