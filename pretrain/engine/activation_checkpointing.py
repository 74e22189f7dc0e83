"""Selective and full activation checkpointing, applied to a model from outside."""

from collections.abc import Callable
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
"""Operations whose outputs selective checkpointing saves: projections and fused attention."""


def checkpoint_activations(model: Model, kind: Literal["selective", "full"]) -> None:
    """Recompute activations of each layer in the backward pass instead of saving them.

    Args:
        kind: "full" saves only each layer's input (Chen et al. 2016). "selective" also saves the outputs of matrix
            products and attention, and recomputes what is cheap to compute and large to save (Korthikanti et al. 2022,
            section 5).
    """
    checkpointed: Any = partial(checkpoint, use_reentrant=False)
    if kind == "selective":
        checkpointed = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _save_products))
    for layer in model.layers:
        layer.forward = partial(checkpointed, layer.forward)


def hide_gathers(zero: Any) -> None:
    """Hide ZeRO stage 3's gathering of weights from selective activation checkpointing.

    Selective checkpointing records a layer's operations, which must be the same when they are recomputed in the
    backward pass. The gathering differs then: weights that were prefetched or are still present are not gathered again.

    Args:
        zero: DeepSpeed's ZeRO optimizer of stage 3.
    """
    hooks = zero.parameter_offload
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        setattr(hooks, name, _without_dispatch_modes(getattr(hooks, name)))


def _without_dispatch_modes(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(module: Any) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            hook(module)

    return call


def _save_products(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
