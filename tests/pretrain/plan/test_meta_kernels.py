"""What stands in for cuDNN's recurrent layers computes and keeps what they do."""

from collections import Counter
from typing import Any

import pytest
import torch
from kinds_of_families import model_section

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.device_type import DeviceType
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.seq2seq.recurrence import GATES, STATES, Cell, run_recurrence_cudnn
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.meta_kernels import meta_kernels
from multihop.pretrain.plan.meta_trace import MetaTrace
from multihop.pretrain.plan.operations import Operation
from multihop.pretrain.plan.rank_trace import trace_rank

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
VOCABULARY = 1024
"""A multiple of 64, to which a GPU pads it."""


def products(device: DeviceType, family: str, **model: Any) -> tuple[float, Counter[Operation]]:
    """The floating-point operations of the matrix products of a micro-batch, and all of its operations."""
    config = TrainingConfig.model_validate(
        {
            "seed": 3,
            "model": model_section(family, hidden=64, max_positions=32, layers=2) | model,
            "objective": {"name": FAMILIES[family].default_objective},
            "phases": [{"seq_len": 32, "global_batch_size": 4, "steps": 9}],
            "engine": {"micro_batch_size": 4, "precision": "fp32", "deepspeed": {}},
        }
    )
    batch = assumed_batch(config, 0, 4, VOCABULARY)
    (operations,) = trace_rank(config, VOCABULARY, None, [batch], 4, 1, device).micro_batches
    return sum(count * each.flops for each, count in operations.items() if each.kind == "product"), operations


@pytest.mark.parametrize(
    ("family", "model"),
    [
        ("awd-lstm", {}),
        ("ctc-encoder", {}),
        ("seq2seq", {"attention": "none"}),
        ("seq2seq", {"attention": "dot", "cell": "gru"}),
    ],
)
def test_a_gpu_computes_the_products_of_a_cpu_in_fewer_operations(family: str, model: dict[str, Any]) -> None:
    """The two are different code: ours, which a CPU runs, and what stands in for cuDNN's."""
    (on_gpu, few), (on_cpu, many) = (products(device, family, **model) for device in ("cuda", "cpu"))
    assert on_gpu == on_cpu
    assert few.total() < 0.4 * many.total()


def kept_bytes(cell: Cell, batch_sizes: tuple[int, ...], width: int, layers: int) -> tuple[int, int]:
    """Bytes that a stack of layers in fp32 keeps for its backward pass, without the weights and its last output; at
    least and at most, because the states are kept too."""
    order = torch.arange(batch_sizes[0])
    steps = TimeSteps(order, order, order, order, batch_sizes)
    with MetaTrace("cuda", 1) as trace, meta_kernels():
        weights = [
            tuple(
                torch.empty(*shape, device="meta", requires_grad=True)
                for shape in ((GATES[cell] * width, width), (GATES[cell] * width, width), *[(GATES[cell] * width,)] * 2)
            )
            for _ in range(layers)
        ]
        x = torch.empty(sum(batch_sizes), width, device="meta")
        states = (torch.empty(batch_sizes[0], width, device="meta"),) * STATES[cell]
        before, lasting = trace.bytes["device"], []
        for each in weights:
            x, last = run_recurrence_cudnn(cell, x, steps, [states], [each])
            lasting += last
        del last
        of_weights = layers * sum(weight.numel() for weight in weights[0]) * 4
        of_states = 2 * layers * STATES[cell] * batch_sizes[0] * width * 4  # stacked before, and after
        most = trace.bytes["device"] - before - of_weights - sum(batch_sizes) * width * 4
        return most - of_states, most


@pytest.mark.parametrize(("cell", "reserved"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_a_stack_keeps_the_bytes_that_cudnn_was_seen_to_reserve(cell: Cell, reserved: int) -> None:
    """Sizes from github.com/pytorch/pytorch/issues/2895, for as many tokens as both of them fit. cuDNN computes all
    layers at once, and its reserve has the outputs of all but the last."""
    least, most = kept_bytes(cell, (25,) * 1000, 320, 4)
    assert least <= reserved <= most


def test_sequences_that_end_earlier_reserve_their_padding() -> None:
    assert kept_bytes("lstm", (64,) * 32 + (1,) * 96, 512, 1) == kept_bytes("lstm", (64,) * 128, 512, 1)
