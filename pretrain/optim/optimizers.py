"""The recipe's optimizer over a model's parameters: AdamW of torch, LAMB or Muon."""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from multihop.pretrain.config import OptimizerConfig
from multihop.pretrain.models.build import uses_weight_decay
from multihop.pretrain.models.layers.model import Model
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


def parameter_groups(model: Model, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The optimizer's parameter groups with their settings from the recipe: decayed weights, others, and those that
    Muon orthogonalizes; with `layer_lr_decay` these for each group of layers, from the output to the input.

    `lr_ratio` is the learning rate as a multiple of the schedule's, which is set before each step.
    """
    if config.layer_lr_decay == 1.0:
        return _groups_of(list(model.named_parameters()), config, 1.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        group
        for depth, layer in enumerate(_layers_from_the_output(model))
        for group in _groups_of([(names[id(p)], p) for p in layer], config, config.layer_lr_decay**depth)
    ]


def _layers_from_the_output(model: Model) -> list[list[nn.Parameter]]:
    """The model's groups of layers, of which the first has the token embedding, because it is the output matrix too; as
    in the code of Howard and Ruder (fastai 0.7, `LanguageModel.get_layer_groups`)."""
    embeddings, *blocks, others = model.layer_groups()
    word = [parameter for parameter in embeddings if parameter is model.word.weight]
    below = [parameter for parameter in embeddings if parameter is not model.word.weight]
    return [[*word, *others], *reversed(blocks), below]


def _groups_of(
    named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig, lr_ratio: float
) -> list[dict[str, Any]]:
    """The parameter groups of some of a model's parameters, without those that would be empty."""
    is_muon = config.name == "muon"
    hidden = [p for name, p in named if is_muon and is_orthogonalized(name, whole_shape(p))]
    taken = {id(p) for p in hidden}
    matrices = [p for name, p in named if id(p) not in taken and uses_weight_decay(name)]
    others = [p for name, p in named if not uses_weight_decay(name)]
    # ZeRO stores a group's weights one after another: after a vocabulary's bias of odd size, all would be at addresses
    # that vectorized kernels cannot read.
    others.sort(key=lambda p: math.prod(whole_shape(p)) % _ALIGNED != 0)
    adam: dict[str, Any] = {"betas": config.betas, "eps": config.eps, "lr_ratio": lr_ratio}
    decayed, undecayed = {**adam, "weight_decay": config.weight_decay}, {**adam, "weight_decay": 0.0}
    match config.name:
        case "adamw":
            groups = [(matrices, decayed), (others, undecayed)]
        case "lamb":
            groups = [(matrices, decayed | {"trust": True}), (others, undecayed | {"trust": False})]
        case "muon":
            by_adamw = {"muon": False, "lr_ratio": lr_ratio * config.adamw_lr_ratio}
            orthogonalized = {"muon": True, "weight_decay": config.weight_decay, "momentum": config.momentum}
            groups = [
                (matrices, decayed | by_adamw),
                (others, undecayed | by_adamw),
                (hidden, orthogonalized | {"lr_ratio": lr_ratio}),
            ]
    return [{"params": parameters, **own} for parameters, own in groups if parameters]


def build_optimizer(model: Model, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer over `model`'s parameters; the learning rate is set before each step."""
    groups = parameter_groups(model, config)
    betas, eps = config.betas, config.eps
    if config.name == "adamw":
        return AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
    if config.name == "lamb":
        return Lamb(groups, lr=0.0, betas=betas, eps=eps, weight_decay=0.0, max_trust_ratio=config.max_trust_ratio)
    assert any(group["muon"] for group in groups)
    scale = _SCALES[config.muon_scale]
    return Muon(groups, lr=0.0, momentum=config.momentum, betas=betas, eps=eps, weight_decay=0.0, scale=scale)
