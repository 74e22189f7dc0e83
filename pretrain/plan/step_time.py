"""The time of operations on a GPU, from their sizes: of computing, of moving bytes, and of their launches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from multihop.common.gpus import Gpu
from multihop.pretrain.config import EngineConfig
from multihop.pretrain.plan.collectives import Links, collective_s
from multihop.pretrain.plan.operations import Operation
from multihop.pretrain.plan.rank_trace import RankTrace

_KINDS = ("product", "attention", "memory", "communication")
_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""The tile of a matrix product that a multiprocessor computes at a time."""
_MIN_DEPTH = 512
"""Shortest part of a tile's sums that a multiprocessor computes if they are split."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a GPU's rates that operations reach, and what a launch costs.

    `products`, `attention` and `overlap` are fitted to half of MPT's published speeds (`bench/published_speeds.py`),
    and `memory` to four steps of our own on an H200 (docs/how-to/plan.md). `link` and `launch_s` are estimates.
    """

    products: float = 1.0
    """Of the achievable rate of matrix products, by those whose tiles keep all multiprocessors busy."""
    attention: float = 0.51
    """Of the rate of FlashAttention 2."""
    memory: float = 0.7
    """Of the bandwidth of its memory."""
    link: float = 0.8
    """Of the bandwidth between GPUs and between nodes."""
    overlap: float = 0.91
    """Of the time of collectives, what is hidden behind computing as long as that takes."""
    launch_s: float = 5e-6
    """Seconds of the host for a kernel; a GPU that is faster waits."""


def efficiency_of(engine: EngineConfig) -> Efficiency:
    """The efficiency under a recipe's settings: DeepSpeed overlaps by itself in stage 3 alone."""
    assert isinstance(engine.deepspeed, dict), "the recipe is resolved"
    zero = engine.deepspeed.get("zero_optimization", {})
    overlaps = zero.get("overlap_comm", engine.zero_stage == 3)
    return Efficiency() if overlaps else Efficiency(overlap=0.0)


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of some operations."""

    products: float
    attention: float
    memory: float
    communication: float
    launches: float
    """Of the host, which it does meanwhile."""
    overlap: float
    """Share of the communication that is hidden behind computing, as long as that takes."""

    @property
    def parts(self) -> NDArray[np.float64]:
        """float64 (5,): seconds of the products, attention, memory, communication and launches."""
        return np.array([self.products, self.attention, self.memory, self.communication, self.launches])

    @property
    def by_name(self) -> dict[str, float]:
        """Seconds of each part that may limit the speed; of the communication only what is not hidden counts."""
        computing = max(self.products + self.attention + self.memory, self.launches)
        return {
            "matrix products": self.products,
            "attention": self.attention,
            "memory bandwidth": self.memory,
            "communication": self.communication - min(self.overlap * self.communication, computing),
            "kernel launches": max(0.0, self.launches - self.products - self.attention - self.memory),
        }

    @property
    def largest(self) -> str:
        """The part that takes the longest."""
        return max(self.by_name, key=lambda name: self.by_name[name])

    @property
    def total(self) -> float:
        """Seconds of all."""
        computing = max(self.products + self.attention + self.memory, self.launches)
        return computing + self.communication - min(self.overlap * self.communication, computing)


def time_of(operations: Mapping[Operation, int], gpu: Gpu, links: Links, efficiency: Efficiency) -> StepTime:
    """The time of some operations one after another.

    Args:
        operations: How often each occurs.
    """
    seconds = dict.fromkeys(_KINDS, 0.0)
    for each, count in operations.items():
        moving = each.bytes / (gpu.bandwidth * efficiency.memory)
        match each.kind:
            case "product":
                peak = gpu.achievable_flops
                peak = min(peak, gpu.fp32_flops) if each.dtype == torch.float32 else peak
                rate = peak * efficiency.products
                took = max(_tiled_flops(each, gpu.multiprocessors) / rate, moving)
            case "attention":
                took = max(each.flops / (gpu.attention_flops * efficiency.attention), moving)
            case "memory":
                took = moving
            case "communication":
                took = collective_s(each.bytes, links, efficiency.link, is_all_reduce="allreduce" in each.name)
        seconds[each.kind] += count * took
    launches = efficiency.launch_s * sum(operations.values())
    return _step_time(np.array([*(seconds[kind] for kind in _KINDS), launches]), efficiency.overlap)


def step_parts(
    trace: RankTrace, micro_batches: int, passes: float, gpu: Gpu, links: Links, efficiency: Efficiency
) -> tuple[StepTime, StepTime]:
    """The times of a step's forward and backward passes, and of its update.

    Args:
        micro_batches: Micro-batches of the step, of which the trace has one or two.
        passes: As many micro-batches of the traced size have the tokens of the step. Computing takes as long as they
            do; each of the micro-batches has the launches and the communication of a whole one.
    """
    first, last, update = (
        time_of(each, gpu, links, efficiency)
        for each in (trace.micro_batches[0], trace.micro_batches[-1], trace.update)
    )
    whole = _step_time((micro_batches - 1) * first.parts + last.parts, efficiency.overlap)
    return _scaled(whole, passes / micro_batches), update


def step_time(
    trace: RankTrace, micro_batches: int, passes: float, gpu: Gpu, links: Links, efficiency: Efficiency
) -> tuple[float, str]:
    """Seconds of a step, and the part of it that takes the longest; the arguments are those of `step_parts`."""
    computed, update = step_parts(trace, micro_batches, passes, gpu, links, efficiency)
    return computed.total + update.total, together(computed, update).largest


def evaluation_time(
    trace: RankTrace, micro_batches: int, passes: float, gpu: Gpu, links: Links, efficiency: Efficiency
) -> float:
    """Seconds of forward passes without gradients; the arguments are those of `step_parts`."""
    one = time_of(trace.evaluation, gpu, links, efficiency)
    return _scaled(_step_time(micro_batches * one.parts, efficiency.overlap), passes / micro_batches).total


def together(first: StepTime, second: StepTime) -> StepTime:
    """The parts of two times with the same overlap, as if all of their operations were done at once."""
    return _step_time(first.parts + second.parts, first.overlap)


def _scaled(time: StepTime, share: float) -> StepTime:
    """The time with a share of the computing, and all of the launches and the communication."""
    return replace(time, products=share * time.products, attention=share * time.attention, memory=share * time.memory)


def _step_time(parts: NDArray[np.float64], overlap: float) -> StepTime:
    products, attention, memory, communication, launches = parts.tolist()
    return StepTime(products, attention, memory, communication, launches, overlap)


def _tiled_flops(product: Operation, multiprocessors: int) -> float:
    """The operations that all multiprocessors could do meanwhile: tiles are padded, and in the last round some of the
    multiprocessors have none. The sums of few tiles, such as those of a weight's gradient, are split among them."""
    rows, columns, length = product.shape
    tiles, depth = math.ceil(rows / _TILE_ROWS) * math.ceil(columns / _TILE_COLUMNS), length
    if tiles < multiprocessors:
        splits = min(max(1, length // _MIN_DEPTH), multiprocessors // tiles)
        tiles, depth = tiles * splits, math.ceil(length / splits)
    return math.ceil(tiles / multiprocessors) * multiprocessors * 2.0 * _TILE_ROWS * _TILE_COLUMNS * depth
