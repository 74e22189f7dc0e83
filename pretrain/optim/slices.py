"""Which slice of which parameter this rank owns, and its position in DeepSpeed's flat fp32 buffers.

LAMB and the checkpoints, which need single parameters under ZeRO, both use this map.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
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
    """Offset of the slice in `flat`, in elements."""

    def of(self, tensor: Tensor) -> Tensor:
        """The slice's view, (numel,), of a tensor laid out like `flat`: the weights or a moment."""
        return tensor.view(-1)[self.flat_start : self.flat_start + self.numel]


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """The shape of a whole parameter, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def owned_slices(module: nn.Module, zero: Any | None, stage: int, rank: int, world_size: int) -> list[Slice]:
    """The slices of `module`'s parameters that `rank` owns; over all ranks they cover each parameter exactly once.

    Args:
        zero: DeepSpeed's ZeRO optimizer after initialisation; None in stage 0, where nothing is partitioned and every
            rank is given an equal part of what all of them hold.
    """
    if stage == 0:
        return list(_even_slices(module, rank, world_size))
    return list(_slices_of_stage_3(module, zero) if stage == 3 else _slices_of_stages_1_and_2(module, zero))


def held_slices(module: nn.Module, owned: list[Slice], stage: int) -> list[Slice]:
    """The slices whose weights and moments this rank needs to resume: what it owns, and in stage 0 everything."""
    return owned if stage > 0 else list(_even_slices(module, 0, 1))


def _slices_of_stages_1_and_2(module: nn.Module, zero: Any) -> Iterator[Slice]:
    buffers = {
        id(parameter): flat
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)
        for parameter in parameters
    }
    for name, parameter in module.named_parameters():
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's; None: nothing of it on this rank
        if mapping is not None:
            flat, start = mapping.hp_fragment_address, mapping.lp_fragment_address.start
            yield Slice(name, tuple(parameter.shape), start, flat.numel, buffers[id(parameter)], flat.start)


def _slices_of_stage_3(module: nn.Module, zero: Any) -> Iterator[Slice]:
    for name, parameter in module.named_parameters():
        sub_group, flat_start, part = zero.grad_position[zero.get_param_id(parameter)]
        shape = whole_shape(parameter)
        start = zero._get_param_partition_rank(parameter) * part
        numel = min(part, torch.Size(shape).numel() - start)  # the last ranks' parts are padded, or nothing but padding
        if numel > 0:
            yield Slice(name, shape, start, numel, zero.fp32_partitioned_groups_flat[sub_group], flat_start)


def _even_slices(module: nn.Module, rank: int, world_size: int) -> Iterator[Slice]:
    for name, parameter in module.named_parameters():
        part = -(-parameter.numel() // world_size)  # the same on all ranks but the last ones: one row of a checkpoint
        start = part * rank
        numel = min(part, parameter.numel() - start)
        if numel > 0:
            yield Slice(name, tuple(parameter.shape), start, numel, parameter, start)
