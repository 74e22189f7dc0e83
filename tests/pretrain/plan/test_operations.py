"""The operations of a traced step: their floating-point operations are those that the family counts."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from kinds_of_families import model_section

from multihop.common.errors import UserError
from multihop.common.gpus import GPUS
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.collectives import links_of
from multihop.pretrain.plan.operations import Operation
from multihop.pretrain.plan.rank_trace import RankTrace, trace_rank
from multihop.pretrain.plan.step_time import Efficiency, step_time, time_of
from multihop.pretrain.run.throughput import step_flops

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
VOCABULARY = 1000
ALONE, NODE = (links_of(GPUS["H100"], ranks) for ranks in (1, 4))
SLOW = links_of(GPUS["H100"], 4, 2, 8.0)
LOOPS = {"awd-lstm-backward", "bilm", "ctc-encoder", "seq2seq"}
"""Families that compute one time step after another, whose traces take long; awd-lstm stands for them."""


def config_of(family: str, **engine: Any) -> TrainingConfig:
    layers = {"layers": 2, "heads": 4}
    if FAMILIES[family].uses_ctc:  # an LSTM, unless the recipe says otherwise
        del layers["heads"]
    elif family == "bag":  # which has none
        layers["layers"] = 0
    return TrainingConfig.model_validate(
        {
            "seed": 3,
            "model": model_section(family, hidden=256, max_positions=256, **layers),
            "objective": {"name": FAMILIES[family].default_objective},
            "phases": [{"seq_len": 256, "global_batch_size": 64, "steps": 9}],
            "engine": {"micro_batch_size": 8, "precision": "bf16", **engine},
        }
    )


def traced(family: str, world_size: int = 1, micro_batches: int = 1, **engine: Any) -> tuple[Batch, RankTrace]:
    config = config_of(family, **engine)
    batch = assumed_batch(config, 0, 8, VOCABULARY)
    return batch, trace_rank(config, VOCABULARY, None, [batch] * micro_batches, 8, world_size)


def flops(operations: Counter[Operation], *kinds: str) -> float:
    """The floating-point operations of these kinds; of all if none is given."""
    return sum(count * each.flops for each, count in operations.items() if not kinds or each.kind in kinds)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.long] if name in LOOPS else []) for name in FAMILIES]
)
def test_as_many_as_the_family_counts(family: str) -> None:
    batch, trace = traced(family)
    expected = step_flops(config_of(family).model, VOCABULARY, batch)
    found = flops(trace.micro_batches[0])
    # Kernels compute the scores a second time in the backward pass.
    assert 0.98 * expected < found < 1.25 * expected, found / expected


def test_a_family_without_counts_says_so() -> None:
    class Uncounted(ModelConfig):
        """A family whose author has not written `train_flops`."""

    model = Uncounted(family="not-counted", layers=1, hidden=8, max_positions=8)
    batch, _ = traced("gpt2")
    complaint = "model.family=not-counted does not implement train_flops, which MFU .* implement it in .*/not_counted/"
    with pytest.raises(UserError, match=complaint):
        step_flops(model, VOCABULARY, batch)


def test_full_checkpointing_adds_a_forward_pass_of_the_layers() -> None:
    usual, again = (
        flops(traced("gpt2", activation_checkpointing=kind)[1].micro_batches[0]) for kind in ("none", "full")
    )
    assert 1.2 < again / usual < 1.34


def test_attention_is_quadratic_in_the_length_of_each_sequence() -> None:
    _, trace = traced("gpt2")
    attention = flops(trace.micro_batches[0], "attention")
    pairs, layers, width = 8 * 256**2 / 2, 2, 256  # half of them under the causal mask
    assert attention == layers * (2 + 5) * 2 * pairs * width


ALWAYS_RELEASED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


@pytest.mark.parametrize(("stage", "zero", "times"), [(1, {}, 3), (2, {}, 3), (3, {}, 2), (3, ALWAYS_RELEASED, 3)])
def test_what_is_sent_between_ranks(stage: int, zero: dict[str, int], times: float) -> None:
    """In stages 1 and 2 DeepSpeed sums gradients by all-reduce, twice the parameters, and gathers the weights, once; in
    stage 3 it gathers them for both passes and scatters the gradients (Rajbhandari et al. 2020, section 7), but keeps
    the weights of a small model for the backward pass."""
    _, trace = traced("gpt2", world_size=4, zero_stage=stage, deepspeed={"zero_optimization": zero})
    parameters = sum(p.numel() for p in build_model_on_meta(config_of("gpt2").model, VOCABULARY).parameters())
    step = trace.micro_batches[0] + trace.update
    sent = sum(count * each.bytes for each, count in step.items() if each.kind == "communication")
    assert sent == pytest.approx(times * 2 * parameters * 3 / 4, rel=0.1)


def test_half_the_bandwidth_and_more_micro_batches_take_longer() -> None:
    _, trace = traced("gpt2", world_size=4, micro_batches=2)
    gpu, efficiency = GPUS["H100"], Efficiency()
    fast, slow = (step_time(trace, 2, 2.0, gpu, links, efficiency) for links in (NODE, SLOW))
    assert slow[0] > fast[0] and slow[1] == "communication"
    # Nothing is done at the same time, so that the parts add up.
    apart = Efficiency(launch_s=0.0, overlap=0.0)
    two, ten = (step_time(trace, count, count, gpu, NODE, apart)[0] for count in (2, 10))
    assert np.isclose(ten - two, 8 * time_of(trace.micro_batches[0], gpu, NODE, apart).total)
    h100, a100 = (
        step_time(trace, 2, 2.0, each, NODE, Efficiency(launch_s=0.0))[0] for each in (gpu, GPUS["A100 80GB"])
    )
    assert a100 > h100


def test_a_last_micro_batch_of_few_samples_takes_as_long_as_its_tokens_and_its_launches() -> None:
    _, trace = traced("gpt2")
    gpu = GPUS["H100"]
    for efficiency in (Efficiency(launch_s=0.0), Efficiency(launch_s=1.0)):
        whole, more = (
            step_time(trace, count, passes, gpu, ALONE, efficiency)[0] for count, passes in ((1, 1.0), (2, 1.1))
        )
        update = time_of(trace.update, gpu, ALONE, efficiency).total
        expected = 1.1 if efficiency.launch_s == 0 else 2.0
        assert (more - update) / (whole - update) == pytest.approx(expected)


def test_a_small_product_keeps_few_multiprocessors_busy() -> None:
    gpu, efficiency = GPUS["H100"], Efficiency(launch_s=0.0)

    def seconds(rows: int, length: int) -> float:
        product = Operation("product", "mm", 2.0 * rows * 4096 * length, 0, torch.bfloat16, (rows, 4096, length))
        return time_of(Counter([product]), gpu, ALONE, efficiency).products

    assert seconds(128, 512) == pytest.approx(seconds(64, 512))
    assert seconds(8192, 512) == pytest.approx(8 * seconds(128, 512))
    # Long sums of few tiles are split among the others.
    assert seconds(128, 4096) == pytest.approx(seconds(128, 512))
