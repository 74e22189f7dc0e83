"""Selective and full activation checkpointing, applied to a model from outside."""

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from multihop.pretrain.models.build import Model

_aten = torch.ops.aten
_SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._flash_attention_forward.default,
    _aten._efficient_attention_forward.default,
}
"""Operations whose outputs selective checkpointing saves: projections and fused attention, this only without dropout.

What is saved is not called again, and would not draw its random numbers again: all later masks of dropout in the layer
would be others than in the forward pass."""


def checkpoint_activations(model: Model, kind: Literal["selective", "full"]) -> None:
    """Recompute activations of each layer in the backward pass instead of saving them.

    Args:
        kind: "full" saves only each layer's input (Chen et al. 2016). "selective" also saves the outputs of matrix
            products and of attention without dropout, and recomputes the rest, which is cheap to compute and large to
            save (Korthikanti et al. 2022, section 5). Attention of short sequences on a GPU is recomputed as well.
    """
    checkpointed: Any = partial(checkpoint, use_reentrant=False)
    if kind == "selective":
        checkpointed = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _save_products))
    for layer in model.layers:
        layer.forward = partial(checkpointed, layer.forward)


def _save_products(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    if operation not in _SAVED or _dropout_of(operation, arguments, keywords) > 0:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _dropout_of(operation: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> float:
    """The dropout rate of a call of an operation; 0 if it has none."""
    parameters = [each.name for each in operation._schema.arguments]
    rate: float = {**dict(zip(parameters, arguments, strict=False)), **keywords}.get("dropout_p", 0.0)
    return rate
