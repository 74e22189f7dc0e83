"""Converts a batch's arrays to a model's inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from multihop.pretrain.objectives.batch import ModelInput
from multihop.pretrain.packed_tokens import PackedTokens


def to_device(inputs: Mapping[str, ModelInput], device: torch.device) -> dict[str, Any]:
    """The keyword arguments of a model's forward: arrays become tensors on the device, numbers stay numbers."""
    return {name: _value_to_device(value, device) for name, value in inputs.items()}


def packed_to_device(packed: PackedTokens[NDArray[Any]], device: torch.device) -> PackedTokens[Tensor]:
    """The same tokens as tensors on a device."""
    return PackedTokens(
        _copy(packed.input_ids, device),
        _copy(packed.positions, device),
        _copy(packed.cu_seqlens, device),
        packed.max_seqlen,
        None if packed.token_type_ids is None else _copy(packed.token_type_ids, device),
    )


def _value_to_device(value: ModelInput, device: torch.device) -> PackedTokens[Tensor] | Tensor | float | int:
    match value:
        case PackedTokens():
            return packed_to_device(value, device)
        case int() | float():
            return value
    return _copy(value, device)


def _copy(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the device
    return tensor.to(device, non_blocking=True)
