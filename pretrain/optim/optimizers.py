"""The recipe's optimizer over a model's parameters: AdamW of torch, LAMB or Muon."""

import math
import re
from typing import Any

import torch
from torch import nn

from multihop.pretrain.config import OptimizerConfig
from multihop.pretrain.models.build import uses_weight_decay
from multihop.pretrain.optim.lamb import Lamb
from multihop.pretrain.optim.muon import Muon, adamw_rms_scale, original_scale
from multihop.pretrain.optim.slices import whole_shape
from multihop.pretrain.uncompiled import AdamW

_ALIGNED = 8
"""Number of elements in 16 bytes of bf16, which a GPU loads at once."""
_SCALES = {"original": original_scale, "match_rms_adamw": adamw_rms_scale}


def moments_of(config: OptimizerConfig, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The state of a parameter for each of its elements, beside the number of updates, "step"."""
    if config.name == "muon" and is_orthogonalized(name, shape):
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq")


def is_orthogonalized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates a parameter: a matrix of a layer, and not an embedding of distances or segments."""
    in_layer = re.match(r"\w+\.\d+\.", name) is not None
    is_embedding = name.endswith(("distance.weight", "segment.weight"))
    return in_layer and len(shape) == 2 and min(shape) > 1 and not is_embedding


def hyperparameters(config: OptimizerConfig) -> list[dict[str, Any]]:
    """What the recipe sets of the optimizer's parameter groups: of decayed weights, of others, and of those that Muon
    orthogonalizes. The learning rate is set before each step."""
    adam = {"betas": config.betas, "eps": config.eps}
    decayed, others = {**adam, "weight_decay": config.weight_decay}, {**adam, "weight_decay": 0.0}
    match config.name:
        case "adamw":
            return [decayed, others]
        case "lamb":
            return [decayed | {"trust": True}, others | {"trust": False}]
        case "muon":
            by_adamw = {"muon": False, "lr_ratio": config.adamw_lr_ratio}
            orthogonalized = {"muon": True, "weight_decay": config.weight_decay, "momentum": config.momentum}
            return [decayed | by_adamw, others | by_adamw, orthogonalized]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer over `model`'s parameters; the learning rate is set before each step."""
    named = list(model.named_parameters())
    is_muon = config.name == "muon"
    hidden = [p for name, p in named if is_muon and is_orthogonalized(name, whole_shape(p))]
    taken = {id(p) for p in hidden}
    matrices = [p for name, p in named if id(p) not in taken and uses_weight_decay(name)]
    others = [p for name, p in named if not uses_weight_decay(name)]
    # ZeRO stores a group's weights one after another: after a vocabulary's bias of odd size, all would be at addresses
    # that vectorized kernels cannot read.
    others.sort(key=lambda p: math.prod(whole_shape(p)) % _ALIGNED != 0)
    parameters = [matrices, others, hidden] if is_muon else [matrices, others]
    groups = [{"params": each, **own} for each, own in zip(parameters, hyperparameters(config), strict=True)]
    betas, eps = config.betas, config.eps
    if config.name == "adamw":
        return AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    if config.name == "lamb":
        return Lamb(groups, lr=0.0, betas=betas, eps=eps, weight_decay=0.0, max_trust_ratio=config.max_trust_ratio)
    assert hidden
    scale = _SCALES[config.muon_scale]
    return Muon(groups, lr=0.0, momentum=config.momentum, betas=betas, eps=eps, weight_decay=0.0, scale=scale)
