"""Tells rounding from faults: how far the same steps, trained with sums in another order, can differ.

Every element of a weight or moment is compared with its own size and that of the other elements:

    |found - expected| / (|expected| + max(rms of its tensor, 0.1 * rms of all tensors of its kind))

exp_avg_sq is compared by its square root, which like the other moments is as large as a gradient. The largest of these
differences is judged. A mean over a tensor would hide one flipped bit among many elements, and an element's own size
alone would make much of elements that are zero but for rounding. So are whole tensors: the gradient of the bias of the
attention's keys is 0 in exact arithmetic. The rms of its kind says that its moments are small; but Adam divides them by
one another, and moves its weights by what rounding alone decides. Such weights have a bound of their own, which only
numbers of another order of magnitude exceed.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multihop.pretrain.checkpoint.manifest import CheckpointManifest

Read = Callable[[str, str, int, int], Tensor]
"""Returns elements of a tensor, float32, given its kind, its parameter, the first one, and their number."""

StateTensor = tuple[str, str, int]
"""The kind, the parameter and the number of elements of a weight or moment."""

BOUNDS = {"fp32": 3e-3, "fp16": 0.1, "bf16": 0.4}
"""The largest difference that counts as rounding, by precision.

Between correct replays of at most `MAX_STEPS`, `python bench/replay_rounding.py` (2026-11-29, torch 2.13, CPU) measured
up to 2.9e-4 in fp32, 0.023 in fp16 and 0.16 in bf16: the margins are 10, 4 and 2.5. With a margin of 10, faults would
pass in bf16."""
MAX_STEPS = {"fp32": 20, "fp16": 10, "bf16": 10}
"""Steps that a replay may have, because training amplifies rounding: to 0.13 in fp32 after 50, to 0.25 in bf16 after
20."""
NOISE_BOUND = 10.0
"""The largest difference of a weight whose exp_avg is rounding alone: both trainings move it by about as much, in other
directions. Correct replays had up to 1.1 (bf16), and these were biases of the attention's keys alone."""
_OF_KIND = 0.1
"""Share of the rms of a kind that is added to an element's size at least."""
_OF_ROUNDING = 0.1
"""Norm of the difference of a parameter's exp_avg, relative to its norm, from which on that moment counts as rounding
alone, if it is tiny too (`_TINY`)."""
_TINY = 0.1
"""Rms of a parameter's exp_avg, relative to its scale, below which it may be rounding alone: a hundredth of the rms of
its kind. In correct replays of a BERT with 2 layers, the biases of the attention's keys were below a 10,000th. Only one
other moment differed by more than `_OF_ROUNDING`, that of next_sentence.bias, which was at 0.19."""
_CHUNK = 2**22
"""Elements that are in memory at once, of each checkpoint."""


@dataclass(frozen=True)
class LargestDifference:
    """The element of all tensors of a kind that differs most."""

    kind: str
    """weight, or the name of a moment."""
    parameter: str
    relative: float
    """The difference of the element, as in this module's docstring; inf if one of both is not finite."""
    is_noise: bool = False
    """Whether it is a weight whose exp_avg is rounding alone."""


def largest_differences(found: Read, expected: Read, tensors: list[StateTensor]) -> list[LargestDifference]:
    """The element that differs most, of each kind of tensor; reads `found` once and `expected` twice.

    Weights whose exp_avg is rounding alone are a kind of their own.

    Args:
        tensors: every tensor of the state.
    """
    rows, noise = [], set()
    for (kind, parameter, size), scale in scales(expected, tensors).items():
        relative = square = of_expected = 0.0
        for one, other in chunks((kind, parameter, size), found, expected):
            relative = max(relative, float(relative_differences(kind, scale, one, other).max()))
            square += float((one.double() - other.double()).square().sum())
            of_expected += float(other.double().square().sum())
        rows.append(LargestDifference(kind, parameter, relative))
        is_tiny = of_expected < size * (_TINY * scale) ** 2
        if kind == "exp_avg" and is_tiny and square > _OF_ROUNDING**2 * of_expected:
            noise.add(parameter)
    rows = [replace(row, is_noise=row.kind == "weight" and row.parameter in noise) for row in rows]
    kinds = dict.fromkeys((row.kind, row.is_noise) for row in rows)
    return [
        max((row for row in rows if (row.kind, row.is_noise) == kind), key=lambda row: row.relative) for kind in kinds
    ]


def scales(expected: Read, tensors: list[StateTensor]) -> dict[StateTensor, float]:
    """What is added to the size of an element, by tensor; reads all tensors."""
    squares = {
        tensor: sum(float(_size(tensor[0], part).square().sum()) for (part,) in chunks(tensor, expected))
        for tensor in tensors
    }
    totals: dict[str, float] = {}
    elements: dict[str, int] = {}
    for (kind, _, size), square in squares.items():
        totals[kind], elements[kind] = totals.get(kind, 0.0) + square, elements.get(kind, 0) + size
    return {
        (kind, parameter, size): max(
            math.sqrt(square / max(1, size)), _OF_KIND * math.sqrt(totals[kind] / max(1, elements[kind]))
        )
        for (kind, parameter, size), square in squares.items()
    }


def relative_differences(kind: str, scale: float, found: Tensor, expected: Tensor) -> Tensor:
    """The difference of each element, float64, as in this module's docstring; inf where one is not finite."""
    one, other = _size(kind, found), _size(kind, expected)
    relative = torch.where(found == expected, 0.0, (one - other).abs() / (other.abs() + scale))
    return relative.nan_to_num(nan=math.inf, posinf=math.inf)


def compared_tensors(found: CheckpointManifest, expected: CheckpointManifest) -> list[StateTensor]:
    """Every tensor of two checkpoints of one model, in the order of the parameters; format versions 2 and 3 do not name
    the kinds, so that those of the other checkpoint count."""
    named = expected if expected.kinds else found
    assert named.kinds, "a checkpoint that was just saved names its kinds"
    return [
        (kind, parameter, math.prod(shape))
        for parameter, shape in expected.parameters.items()
        for kind in named.other_kinds.get(parameter, named.kinds)
    ]


def chunks(tensor: StateTensor, *reads: Read) -> Iterator[tuple[Tensor, ...]]:
    """A tensor in parts, as each of several checkpoints has them."""
    kind, parameter, size = tensor
    for start in range(0, size, _CHUNK):
        yield tuple(read(kind, parameter, start, min(_CHUNK, size - start)) for read in reads)


def _size(kind: str, tensor: Tensor) -> Tensor:
    return tensor.double().sqrt() if kind == "exp_avg_sq" else tensor.double()
