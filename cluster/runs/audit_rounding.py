"""Judges an audit whose replay ran under other conditions: whether it differs by no more than rounding."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.rounding import (
    BOUNDS,
    MAX_STEPS,
    NOISE_BOUND,
    compared_tensors,
    largest_differences,
)
from multihop.pretrain.config import TrainingConfig

_DRAWN_BY = (
    "world_size",
    "device",
    "micro_batch_sizes",
    "engine.compile",
    "torch",
    "triton",
    "multihop's code",
    "versions",
)
"""Conditions that decide which units dropout drops; "versions" is changed if the run did not record them."""
_INITIALIZED_BY = ("torch", "multihop's code", "versions")
"""Conditions that decide the initial weights."""


@dataclass(frozen=True)
class Rounding:
    """What the bounds of rounding say of a replay whose bits differ."""

    is_within: bool | None
    """Whether every weight and moment is within the bound, and no counter differs; None: there is no verdict."""
    reason: str = ""
    """Why there is no verdict."""
    kind: str | None = None
    """Kind of the tensor with the element that differs most: weight, or the name of a moment."""
    parameter: str | None = None
    """The tensor's parameter."""
    relative: float | None = None
    """The element's difference (`multihop.pretrain.checkpoint.rounding`); None: it is not finite."""
    bound: float | None = None
    """The largest difference that counts as rounding."""


def judge_rounding(
    found: CheckpointReader,
    expected: CheckpointReader,
    config: TrainingConfig,
    first: int,
    changed: Collection[str],
    counters: list[str],
) -> Rounding:
    """Judge a replay; reads one checkpoint whole and the other twice.

    Args:
        config: the recipe of the replay.
        first: the step that it started from.
        changed: names of the conditions that were not the same.
        counters: the counters that differ.
    """
    precision = config.engine.precision
    reason = _why_no_verdict(config, first, expected.manifest.step - first, changed)
    if reason:
        return Rounding(None, reason)
    if counters and precision == "fp16":
        return Rounding(None, f"{counters[0]}: in fp16 rounding decides whether a step overflows")
    rows = largest_differences(found.read, expected.read, compared_tensors(found.manifest, expected.manifest))
    bounds = [NOISE_BOUND if row.is_noise else BOUNDS[precision] for row in rows]
    most, bound = max(zip(rows, bounds, strict=True), key=lambda each: each[0].relative / each[1])
    relative = most.relative if math.isfinite(most.relative) else None
    return Rounding(not counters and most.relative <= bound, "", most.kind, most.parameter, relative, bound)


def _why_no_verdict(config: TrainingConfig, first: int, steps: int, changed: Collection[str]) -> str:
    precision = config.engine.precision
    if "recipe" in changed:
        return "the recipe changed between the two checkpoints"
    if steps > MAX_STEPS[precision]:
        return (
            f"{steps:,} steps were replayed, and training amplifies rounding: its bound in {precision} is for up to "
            f"{MAX_STEPS[precision]}"
        )
    keys = config.model.model_dump()
    if keys.get("bptt") or any(rate for key, rate in keys.items() if "dropout" in key):
        drawn = [name for name in _DRAWN_BY if name in changed]
        if drawn:
            return f"{', '.join(drawn)} changed, so dropout or bptt may draw other random numbers"
    if first == 0 and config.model.init_from is None:
        initialized = [name for name in _INITIALIZED_BY if name in changed]
        if initialized:
            return f"{', '.join(initialized)} changed, so the initial weights may differ"
    return ""
