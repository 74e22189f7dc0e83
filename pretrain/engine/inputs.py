"""From an objective's arrays to a model's arguments."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(inputs: Mapping[str, NDArray[Any] | int | float], device: torch.device) -> dict[str, Any]:
    """The keyword arguments of a model's forward: int64 tensors, and numbers that stay numbers."""
    return {name: value if isinstance(value, int | float) else _copy(value, device) for name, value in inputs.items()}


def _copy(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from pageable memory would wait for the device
    return tensor.to(device, non_blocking=True)
