"""The time of operations on a GPU, from their sizes: that of computing, of moving bytes, or of the launch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from multihop.common.gpus import Gpu
from multihop.pretrain.plan.operations import Operation
from multihop.pretrain.plan.rank_trace import RankTrace

_FP32_SHARE = 1 / 16
"""The rate of products in fp32, without TF32, as a share of that in bf16 (NVIDIA's datasheets, A100 to H200)."""
_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""The tile of a matrix product that a multiprocessor computes at a time."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a GPU's rates that operations reach, and what a launch costs. They are estimates, not fitted."""

    products: float = 0.95
    """Of the achievable rate of matrix products, by those whose tiles keep all multiprocessors busy."""
    attention: float = 0.55
    """Of the achievable rate of matrix products, by attention."""
    memory: float = 0.8
    """Of the bandwidth of its memory."""
    link: float = 0.8
    """Of the bandwidth between GPUs and between nodes."""
    overlap: float = 0.0
    """Of the time of collectives, what is hidden behind computing as long as that takes: 0 without prefetching."""
    launch_s: float = 5e-6
    """The shortest time of a kernel, its launch included, in seconds."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of some operations."""

    products: float
    attention: float
    memory: float
    communication: float
    hidden: float
    """Of the communication, what is hidden behind the others as long as they take."""

    @property
    def total(self) -> float:
        """Seconds of all."""
        computing = self.products + self.attention + self.memory
        return computing + self.communication - min(self.hidden, computing)


def time_of(operations: Iterable[Operation], gpu: Gpu, bus_bandwidth: float, efficiency: Efficiency) -> StepTime:
    """The time of some operations one after another.

    Args:
        bus_bandwidth: bytes that a rank sends to others in a second, in collectives of all ranks.
    """
    seconds = {"product": 0.0, "attention": 0.0, "memory": 0.0, "communication": 0.0}
    for each in operations:
        moving = each.bytes / (gpu.bandwidth * efficiency.memory)
        match each.kind:
            case "product":
                rate = gpu.achievable_flops * efficiency.products
                rate *= _FP32_SHARE if each.dtype == torch.float32 else 1.0
                took = max(_tiled_flops(each, gpu.multiprocessors) / rate, moving)
            case "attention":
                took = max(each.flops / (gpu.achievable_flops * efficiency.attention), moving)
            case "memory":
                took = moving
            case "communication":
                took = each.bytes / (bus_bandwidth * efficiency.link)
        seconds[each.kind] += max(took, efficiency.launch_s)
    hidden = efficiency.overlap * seconds["communication"]
    return StepTime(seconds["product"], seconds["attention"], seconds["memory"], seconds["communication"], hidden)


def step_seconds(trace: RankTrace, micro_batches: int, gpu: Gpu, bus_bandwidth: float, efficiency: Efficiency) -> float:
    """Seconds of a step with a number of micro-batches, of which the trace has one or two."""
    first, *_, last = (
        time_of(each, gpu, bus_bandwidth, efficiency).total for each in [*trace.micro_batches[:1], *trace.micro_batches]
    )
    return (micro_batches - 1) * first + last + time_of(trace.update, gpu, bus_bandwidth, efficiency).total


def _tiled_flops(product: Operation, multiprocessors: int) -> float:
    """The operations that all multiprocessors could do meanwhile: tiles are padded, and in the last round some of the
    multiprocessors have none."""
    rows, columns, length = product.shape
    tiles = math.ceil(rows / _TILE_ROWS) * math.ceil(columns / _TILE_COLUMNS)
    return math.ceil(tiles / multiprocessors) * multiprocessors * 2.0 * _TILE_ROWS * _TILE_COLUMNS * length
