"""The optimizers and their parameter groups."""

import math
from typing import Any

import torch
from torch import nn

from multihop.pretrain.config import OptimizerConfig
from multihop.pretrain.models.build import uses_weight_decay
from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.optim.slices import whole_shape

_ALIGNED = 8
"""Elements: 16 bytes of bf16, what a GPU loads at once."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""The state of both optimizers for each element of a weight, beside the number of updates, "step"."""


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer over `model`'s parameters; the learning rate is set before each step."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if uses_weight_decay(name)]
    others = [p for name, p in named if not uses_weight_decay(name)]
    # ZeRO lays a group's weights one after another: behind a vocabulary's bias of odd size all would lie at addresses
    # that vectorised kernels cannot read.
    others.sort(key=lambda p: math.prod(whole_shape(p)) % _ALIGNED != 0)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)
    for group, trust in zip(groups, (True, False), strict=True):
        group["trust"] = trust
    return Lamb(groups, lr=0.0, betas=config.betas, eps=config.eps, weight_decay=0.0, max_trust=config.max_trust)
