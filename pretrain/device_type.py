"""The type of the device that a tensor is on, or would be on: where code differs between CPUs and GPUs, it asks here.

A run is planned with tensors on the meta device, which have no data; they are computed as on a GPU, or as on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

DeviceType = Literal["cpu", "cuda"]
_planned: list[DeviceType] = ["cuda"]


def device_type(device: torch.device) -> str:
    """The type of a device; of the meta device, of the one that is planned for."""
    return _planned[-1] if device.type == "meta" else device.type


@contextmanager
def plan_for(planned: DeviceType) -> Iterator[None]:
    """Let the meta device stand for this type until the block ends; else it stands for a GPU."""
    _planned.append(planned)
    try:
        yield
    finally:
        _planned.pop()
