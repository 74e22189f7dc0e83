"""The differences between two checkpoints of one model, element by element."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.reader import CheckpointReader

_CHUNK = 2**22
"""Elements that are in memory at once, of each checkpoint."""
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
    """What differs in the progress of two checkpoints, such as "tokens 2519 for 2470"."""
    pairs = ((name, getattr(found, name), getattr(expected, name)) for name in _COUNTERS)
    return [f"{name} {one} for {other}" for name, one, other in pairs if one != other]


def differing_tensors(found: CheckpointReader, expected: CheckpointReader) -> Iterator[TensorDifference]:
    """Every weight and moment that differs, in the order of their names; reads both checkpoints whole.

    Raises:
        UserError: One does not hold a tensor that the other holds.
    """
    manifest = expected.manifest
    for parameter, shape in manifest.parameters.items():
        for kind in manifest.other_kinds.get(parameter, manifest.kinds):
            size = math.prod(shape)
            elements, square, of_expected = 0, 0.0, 0.0
            for start in range(0, size, _CHUNK):
                count = min(_CHUNK, size - start)
                one, other = (reader.read(kind, parameter, start, count) for reader in (found, expected))
                elements += int((one.view(torch.int32) != other.view(torch.int32)).sum())
                square += float((one.double() - other.double()).square().sum())
                of_expected += float(other.double().square().sum())
            if elements:
                relative = math.sqrt(square / of_expected) if of_expected else math.inf
                yield TensorDifference(parameter, kind, elements, size, relative if math.isfinite(relative) else None)
