"""Which slice of which parameter this rank owns, and where it lies in DeepSpeed's flat fp32 buffers.

Everything that has to look at single parameters under ZeRO stands on this one map: the checkpoints do.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Slice:
    """A run of elements of one flattened parameter that this rank is responsible for."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Offset of the slice in the flattened parameter, in elements."""
    numel: int
    flat: Tensor
    """What the optimizer is given as a parameter; its state is kept under this tensor."""
    flat_start: int
    """Where the slice lies in `flat`, flattened."""

    def of(self, tensor: Tensor) -> Tensor:
        """The slice's view, (numel,), of a tensor laid out like `flat`: the weights or a moment."""
        return tensor.view(-1)[self.flat_start : self.flat_start + self.numel]


def owned_slices(module: nn.Module, zero: Any | None, rank: int, world_size: int) -> list[Slice]:
    """The slices of `module`'s parameters that `rank` owns; over all ranks they cover each parameter exactly once.

    Args:
        zero: DeepSpeed's ZeRO-1 or 2 optimizer after initialisation; None where nothing is partitioned (ZeRO-0), and
            every rank is given an equal part of what all of them hold.
    """
    if zero is None:
        return _even_slices(module, rank, world_size)
    buffers = {
        id(parameter): flat
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        for parameter in parameters
    }
    slices = []
    for name, parameter in module.named_parameters():
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's; None: nothing of it on this rank
        if mapping is not None:
            in_flat, in_parameter = mapping.hp_fragment_address, mapping.lp_fragment_address
            slices.append(
                Slice(
                    name,
                    tuple(parameter.shape),
                    in_parameter.start,
                    in_flat.numel,
                    buffers[id(parameter)],
                    in_flat.start,
                )
            )
    return slices


def _even_slices(module: nn.Module, rank: int, world_size: int) -> list[Slice]:
    slices = []
    for name, parameter in module.named_parameters():
        start = parameter.numel() * rank // world_size
        stop = parameter.numel() * (rank + 1) // world_size
        if stop > start:
            slices.append(Slice(name, tuple(parameter.shape), start, stop - start, parameter, start))
    return slices
