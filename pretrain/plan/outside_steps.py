"""The time of a run outside of its GPUs' operations: saves, held-out evaluation, making batches, and offloading.

Steps are numbered from 1, as the training loop counts those that are done.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multihop.common.gpus import Gpu
from multihop.pretrain.config import OptimizerConfig
from multihop.pretrain.optim.optimizers import moments_of
from multihop.pretrain.plan.collectives import Links
from multihop.pretrain.plan.rank_trace import HostTraffic, RankTrace
from multihop.pretrain.plan.step_time import Efficiency, StepTime, together
from multihop.pretrain.run.health import HEALTH_PARTS
from multihop.pretrain.run.heldout import MAX_SOURCES

HOST_BANDWIDTH = 100e9
"""Bytes per second that the ranks of a node together read from and write to its memory. An assumption."""
_FP32_BYTES = 4


def checkpoint_bytes(optimizer: OptimizerConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of a checkpoint: the weights and the optimizer's moments, all in fp32.

    Args:
        shapes: The shapes of the model's parameters by name.
    """
    copies = {name: 1 + len(moments_of(optimizer, name, shape)) for name, shape in shapes.items()}
    return sum(_FP32_BYTES * copies[name] * math.prod(shape) for name, shape in shapes.items())


def host_rate(gpu: Gpu, links: Links, share: float) -> float:
    """Bytes per second that each rank copies between its GPU and the host's memory, while all ranks of its node do.

    Args:
        share: Of the bandwidth of PCIe, what a copy reaches.
    """
    return min(share * gpu.pcie, _host_bandwidth(links))


def count_due(first: int, steps: int, interval: int, total: int) -> int:
    """How many of the steps after `first` are multiples of an interval, or the last one of a run of `total` steps."""
    last = first + steps
    ends_between = last == total and total % interval != 0
    return last // interval - first // interval + ends_between


@dataclass(frozen=True)
class Saves:
    """The saves of a run; at most one is in progress."""

    interval: int
    """Steps between two of them; there is another one at the end."""
    pause_s: float
    """Seconds in which training waits for the copy into the host's memory."""
    write_s: float
    """Seconds from there to the commit, in which training goes on."""


def seconds_of_saves(saves: Saves, phases: Sequence[tuple[int, float]], total: int) -> list[float]:
    """Seconds that training waits for saves in each phase.

    It waits for each copy, before that until the save before is committed, and at the end for the last commit.

    Args:
        phases: The steps of each phase, from the first on, and its seconds without saves.
        total: Steps of all phases of the run.
    """
    found, done = [], 0
    busy_s = 0.0
    """Seconds until the save in progress is committed."""
    for steps, seconds in phases:
        each_s, first, done = seconds / steps, done, done + steps
        count = done // saves.interval - first // saves.interval
        waited_s = count * saves.pause_s
        if count:
            waited_s += max(0.0, busy_s - (saves.interval - first % saves.interval) * each_s)
            waited_s += (count - 1) * max(0.0, saves.write_s - saves.interval * each_s)
            busy_s = max(0.0, saves.write_s - done % saves.interval * each_s)
        else:
            busy_s = max(0.0, busy_s - seconds)
        if done == total:
            if total % saves.interval:
                waited_s += busy_s + saves.pause_s
                busy_s = saves.write_s
            waited_s += busy_s
        found.append(waited_s)
    return found


def count_evaluations(first: int, steps: int, interval: int, total: int) -> int:
    """How often the held-out loss is measured in a phase that begins after step `first`: as `count_due`, and before
    the first step of a run."""
    return count_due(first, steps, interval, total) + (first == 0)


def evaluated_samples(heldout: int, ranks: int, sources: int) -> list[int]:
    """Samples that pass through each rank's model in a held-out evaluation, in groups whose micro-batches are separate:
    all, those of each source if there are several, and a part for the metrics of the model's health.

    Args:
        heldout: Held-out samples over all ranks.
        sources: Number of sources, of which all are assumed to have as many samples.
    """
    groups = [heldout, math.ceil(heldout / HEALTH_PARTS)]
    if 1 < sources <= MAX_SOURCES:
        groups += sources * [math.ceil(heldout / sources)]
    return [math.ceil(group / ranks) for group in groups]


def host_s(traffic: HostTraffic, gpu: Gpu, links: Links, efficiency: Efficiency) -> float:
    """Seconds of copies between GPU and host, and of what the host's CPU reads and writes at the bandwidth of its
    memory."""
    copying = traffic.copied / host_rate(gpu, links, efficiency.link)
    return copying + traffic.accessed / _host_bandwidth(links)


def offload_s(trace: RankTrace, micro_batches: int, gpu: Gpu, links: Links, efficiency: Efficiency) -> float:
    """Seconds of a step in which what is offloaded is copied, and updated on the host's CPU; nothing is hidden behind
    the GPU's computing.

    Args:
        micro_batches: Micro-batches of the step, of which the trace has one or two: all but the first add to its
            gradients.
    """
    first, last = trace.host_micro_batches[0], trace.host_micro_batches[-1]
    parts = [first, *[last] * (micro_batches - 1), trace.host_update]
    return sum(host_s(part, gpu, links, efficiency) for part in parts)


def whole_step(
    computed: StepTime, update: StepTime, offloading_s: float, reading_s: float, data_workers: int
) -> tuple[float, str]:
    """Seconds of a step, and the part of it that takes the longest.

    Args:
        computed: The forward and backward passes.
        update: The update.
        offloading_s: Seconds of what `offload_s` counts.
        reading_s: Seconds in which a process makes the rank's batch.
        data_workers: Such processes, each of which makes the batch of another step; 0: the rank makes the next step's
            batch when it has launched the passes of this one, while the GPU computes.
    """
    parts = together(computed, update).by_name | {"offload": offloading_s}
    seconds = computed.total + update.total + offloading_s
    late_s = reading_s / data_workers - seconds if data_workers else computed.launches + reading_s - computed.total
    if late_s > 0.0:
        parts["reading"] = reading_s / max(1, data_workers)
        seconds += late_s
    return seconds, max(parts, key=lambda name: parts[name])


def _host_bandwidth(links: Links) -> float:
    """A rank's share of the bandwidth of its node's memory."""
    return HOST_BANDWIDTH / math.ceil(links.ranks / links.nodes)
