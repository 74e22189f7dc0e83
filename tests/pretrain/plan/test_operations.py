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
from multihop.pretrain.plan.step_time import Efficiency, evaluation_time, step_time, time_of
from multihop.pretrain.run.throughput import step_flops

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
VOCABULARY = 1000
ALONE, NODE = (links_of(GPUS["H100"], ranks) for ranks in (1, 4))
SLOW = links_of(GPUS["H100"], 4, 2, 8.0)


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
    # A biLM's cells, which are clipped, are computed one time step after another.
    "family",
    [pytest.param(name, marks=[pytest.mark.long] if name == "bilm" else []) for name in FAMILIES],
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


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_an_evaluation_is_a_forward_pass(family: str) -> None:
    """A third of the passes, without the scores that the kernels of attention compute again."""
    batch, trace = traced(family, world_size=4, zero_stage=3, deepspeed={"zero_optimization": ALWAYS_RELEASED})
    expected = step_flops(config_of(family).model, VOCABULARY, batch) / 3
    assert flops(trace.evaluation) == pytest.approx(expected, rel=0.02)
    # The weights are gathered for one pass instead of two.
    sent, of_passes = (
        sum(count * each.bytes for each, count in operations.items() if "allgather" in each.name)
        for operations in (trace.evaluation, trace.micro_batches[0])
    )
    assert sent == pytest.approx(of_passes / 2, rel=0.1)
    once, twice = (evaluation_time(trace, count, 1.5, GPUS["H100"], NODE, Efficiency()) for count in (1, 2))
    apart = time_of(trace.evaluation, GPUS["H100"], NODE, Efficiency(launch_s=0.0, overlap=0.0))
    assert 0 < once < twice
    alone = evaluation_time(trace, 2, 1.5, GPUS["H100"], NODE, Efficiency(launch_s=0.0, overlap=0.0))
    assert alone == pytest.approx(1.5 * (apart.total - apart.communication) + 2 * apart.communication)


@pytest.mark.parametrize(
    ("stage", "offload", "first", "second", "update"),
    [
        (1, "none", (0, 0), (0, 0), (0, 0)),
        # Gradients in fp32 to the host and weights in bf16 back; they are clipped, and AdamW reads and writes them, the
        # weights and two moments.
        (2, "optimizer", (0, 0), (0, 0), (4 + 2, 8 + 32)),
        # Gradients are copied to the host and to the GPU again in the first micro-batch, to the GPU and back in the
        # second, and for the update; small weights are kept on the GPU.
        pytest.param(3, "optimizer+weights", (8, 0), (8, 0), (4 + 4 + 2, 8 + 32 + 8), marks=pytest.mark.long),
    ],
)
def test_what_is_offloaded_is_copied_and_updated_on_the_host(
    stage: int, offload: str, first: tuple[int, int], second: tuple[int, int], update: tuple[int, int]
) -> None:
    keep = {
        "zero_optimization": {"stage3_param_persistence_threshold": 10**9, "stage3_model_persistence_threshold": 10**9}
    }
    config = {"zero_stage": stage, "offload": offload, "deepspeed": keep if stage == 3 else {}}
    _, trace = traced("gpt2", world_size=4, micro_batches=2, **config)
    part = sum(p.numel() for p in build_model_on_meta(config_of("gpt2").model, VOCABULARY).parameters()) / 4
    found = [*trace.host_micro_batches, trace.host_update]
    assert [(round(each.copied / part, 1), round(each.accessed / part, 1)) for each in found] == [first, second, update]


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
