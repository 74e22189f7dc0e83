"""From an objective's arrays to a model's arguments."""

from typing import Any

import torch

from pretrain.objectives.batch import Inputs


def on_device(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of a model's forward: int64 tensors, and numbers that stay numbers."""
    return {
        name: value if isinstance(value, int) else torch.from_numpy(value).to(device, non_blocking=True)
        for name, value in inputs.items()
    }
