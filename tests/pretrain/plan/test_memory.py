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
BOUND = 0.005
"""Largest relative difference of the planned bytes."""
LARGER_BOUNDS = {"ctc-encoder": 0.02, "bert-4-3-fp32": 0.025}
"""The same for cases whose names begin so."""
CASES = [
    ("bert", 1, 0, "fp32", "none", "lamb", "none"),
    ("modernbert", 2, 1, "bf16", "none", "muon", "none"),
    ("gpt2", 2, 2, "bf16", "optimizer", "adamw", "selective"),
    ("albert", 2, 2, "fp16", "none", "lamb", "full"),
    ("gpt2", 2, 3, "bf16", "none", "adamw", "none"),
    ("roberta", 2, 3, "fp32", "optimizer+weights", "adamw", "full"),
]
"""Family, world size, ZeRO stage, precision, offload, optimizer, activation checkpointing."""
SHAPES = [
    ("gpt2", 4, 1, "bf16", "adamw", "none", 3, 96, 128, 3),
    ("gpt2", 4, 2, "bf16", "adamw", "none", 3, 96, 128, 3),
    ("gpt2", 4, 3, "bf16", "adamw", "none", 3, 96, 128, 3),
    ("modernbert", 4, 1, "bf16", "muon", "none", 2, 128, 96, 5),
    ("albert", 4, 2, "fp16", "lamb", "none", 4, 64, 32, 16),
    ("bert", 4, 3, "fp32", "adamw", "full", 4, 128, 64, 8),
    ("gpt", 1, 1, "fp32", "adamw", "selective", 3, 96, 128, 3),
    ("gpt", 2, 1, "bf16", "lamb", "none", 4, 128, 32, 16),
    ("seq2seq", 1, 1, "fp32", "adamw", "none", 2, 96, 32, 6),
    ("seq2seq", 2, 1, "bf16", "adamw", "none", 1, 128, 16, 12),
    ("bilm", 1, 1, "fp32", "adamw", "none", 2, 96, 32, 6),
    ("bilm", 2, 1, "bf16", "lamb", "none", 1, 128, 16, 12),
    ("awd-lstm", 1, 1, "fp32", "adamw", "none", 2, 96, 32, 6),
    ("awd-lstm", 2, 1, "fp32", "adamw", "none", 3, 64, 48, 4),
    ("bag", 1, 1, "fp32", "adamw", "none", 0, 128, 64, 16),
    ("bag", 2, 2, "bf16", "lamb", "none", 0, 64, 128, 5),
    ("xlnet", 2, 1, "fp32", "adamw", "full", 3, 96, 128, 3),
    ("xlnet", 1, 1, "bf16", "lamb", "none", 1, 128, 32, 12),
    ("packed bert", 1, 1, "fp32", "adamw", "none", 3, 96, 128, 6),
    ("packed bert", 2, 2, "bf16", "adamw", "selective", 1, 128, 96, 5),
]
"""Family, world size, ZeRO stage, precision, optimizer, activation checkpointing, and the shape: layers, hidden size,
tokens and samples of a micro-batch. A packed sample has tokens of several documents."""
MORE_CASES = [
    ("xlnet", 1, 2, "bf16", "none", "adamw", "none"),
    ("transformer", 2, 1, "fp32", "none", "adamw", "none"),
    ("modernbert-decoder", 2, 2, "bf16", "none", "adamw", "full"),
    ("ctc-encoder", 1, 1, "fp32", "none", "adamw", "none"),
    ("ctc-encoder", 2, 1, "bf16", "none", "adamw", "none"),
    ("gpt2", 1, 1, "bf16", "none", "adamw", "none"),
]


def settings(
    family: str,
    stage: int,
    precision: str,
    offload: str,
    optimizer: str,
    checkpointing: str,
    seq_len: int = 64,
    layers: int = 2,
    hidden: int = 64,
    samples: int = SAMPLES,
) -> dict[str, Any]:
    packed, name = family.startswith("packed "), family.removeprefix("packed ")
    recurrent = FAMILIES[name].uses_ctc  # its encoder is an LSTM unless the recipe says otherwise
    heads = {} if recurrent else {"heads": 4}
    objective = {"name": "mlm", "isolate_documents": True} if packed else {"name": FAMILIES[name].default_objective}
    return {
        "seed": 3,
        "model": model_section(name, layers=layers, hidden=hidden, max_positions=128, **heads),
        "objective": objective,
        "phases": [{"seq_len": seq_len, "global_batch_size": 64, "steps": 9, "lr": 1e-2}],
        "optimizer": {"name": optimizer},
        "engine": {
            "deepspeed": {},
            "micro_batch_size": samples,
            "precision": precision,
            "zero_stage": stage,
            "offload": offload,
            "activation_checkpointing": checkpointing,
        },
    }


def planned(content: dict[str, Any], world_size: int) -> RankTrace:
    config = TrainingConfig.model_validate(content)
    samples = content["engine"]["micro_batch_size"]
    batches = [assumed_batch(config, 0, samples, VOCABULARY) for _ in range(2)]
    return trace_rank(config, VOCABULARY, None, batches, samples, world_size, "cpu")


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
    check_bytes(content, pool(world_size), request.node.callspec.id, table)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "world_size", "stage", "precision", "optimizer", "checkpointing", "layers", "hidden", "seq_len", "size"),
    SHAPES,
)
def test_it_is_so_in_other_shapes(
    family: str,
    world_size: int,
    stage: int,
    precision: str,
    optimizer: str,
    checkpointing: str,
    layers: int,
    hidden: int,
    seq_len: int,
    size: int,
    pool: Callable[[int], RankPool],
    request: pytest.FixtureRequest,
    table: Table,
) -> None:
    content = settings(family, stage, precision, "none", optimizer, checkpointing, seq_len, layers, hidden, size)
    check_bytes(content, pool(world_size), request.node.callspec.id, table)


def check_bytes(content: dict[str, Any], ranks: RankPool, name: str, table: Table) -> None:
    """Compare the planned bytes with those of the real engine."""
    real = ranks.run(bytes_of_steps, content, VOCABULARY, content["engine"]["micro_batch_size"], 2)[0]
    trace = planned(content, ranks.world_size)
    ours = {"between": trace.between_steps, **trace.peaks}
    ratios = {part: sum(ours[part].values()) / size for part, size in real.items()}
    table(f"{name}: " + ", ".join(f"{part} {ratio - 1:+.1%}" for part, ratio in ratios.items()))
    bound = next((larger for case, larger in LARGER_BOUNDS.items() if name.startswith(case)), BOUND)
    assert all(abs(ratio - 1) <= bound for ratio in ratios.values()), ratios


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


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "stage", "precision", "limit"),
    [("gpt2", 1, "bf16", 1.5e8), ("bert", 2, "fp32", 2e8), ("transformer", 1, "fp32", 3e8)],
)
def test_the_largest_micro_batch_is_that_of_the_real_engine_or_one_less(
    family: str, stage: int, precision: str, limit: float, pool: Callable[[int], RankPool], table: Table
) -> None:
    """A step has many micro-batches, so that making all of them equal takes off little."""
    content = settings(family, stage, precision, "none", "adamw", "none")
    content["engine"]["micro_batch_size"] = "auto"
    content["phases"][0]["global_batch_size"] = 2**17
    plan = RankPlan(TrainingConfig.model_validate(content), 0, 1, Vocabularies(VOCABULARY), "cpu")
    found = plan.largest(limit).micro_batch_size

    def real(samples: int) -> int:
        content["engine"]["micro_batch_size"] = samples
        return max(pool(1).run(bytes_of_steps, content, VOCABULARY, samples, 2)[0].values())

    fits, more = real(found), real(found + 2)
    table(
        f"{family}, ZeRO {stage}: {found} samples take {fits / limit:.2%} of the limit, {found + 2} {more / limit:.2%}"
    )
    assert fits <= limit < more
