"""The differences between two checkpoints of one model, element by element."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.rounding import chunks, compared_tensors

_COUNTERS = ("step", "tokens", "updates", "skipped", "skipped_in_a_row", "counters")


@dataclass(frozen=True)
class TensorDifference:
    """A weight or moment that is not the same in both."""

    parameter: str
    kind: str
    """weight, or the name of a moment."""
    elements: int
    """Number of elements whose bits differ."""
    size: int
    """Number of all elements."""
    relative: float | None
    """Euclidean norm of the difference, divided by that of the expected tensor; None: it is not finite."""


def differing_counters(found: CheckpointManifest, expected: CheckpointManifest) -> list[str]:
    """What differs in the progress of the checkpoints of a replay and of its run, in words."""
    pairs = ((name, getattr(found, name), getattr(expected, name)) for name in _COUNTERS)
    return [f"{name} is {one} in the replay, {other} in the run" for name, one, other in pairs if one != other]


def differing_tensors(found: CheckpointReader, expected: CheckpointReader) -> Iterator[TensorDifference]:
    """Every weight and moment that differs, in the order of their names; reads both checkpoints whole.

    Raises:
        UserError: One does not hold a tensor that the other holds.
    """
    for kind, parameter, size in compared_tensors(found.manifest, expected.manifest):
        elements, square, of_expected = 0, 0.0, 0.0
        for one, other in chunks((kind, parameter, size), found.read, expected.read):
            elements += int((one.view(torch.int32) != other.view(torch.int32)).sum())
            square += float((one.double() - other.double()).square().sum())
            of_expected += float(other.double().square().sum())
        if elements:
            relative = math.sqrt(square / of_expected) if of_expected else math.inf
            yield TensorDifference(parameter, kind, elements, size, relative if math.isfinite(relative) else None)
