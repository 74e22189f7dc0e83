"""What the memory of a traced step is for: each tensor's category, from what the rank does when it is made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from multihop.pretrain.engine.deepspeed_internals import (
    accumulated_gradients,
    gradient_buckets,
    partitioned_weights,
    replaced,
)
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.models.build import Model
from multihop.pretrain.models.layers import fused_linear_cross_entropy as output_layer

Category = Literal[
    "parameters", "gradients", "optimizer_states", "activations", "logits", "buffers", "communication", "workspace"
]
"""What memory is for.

- `parameters`: the weights that the model computes with; in ZeRO stage 3 this rank's part, and whole those that every
  rank keeps.
- `gradients`: the gradients of parameters, summed over micro-batches or not yet.
- `optimizer_states`: moments, and the fp32 weights that are updated, as in Rajbhandari et al. 2020, section 3.1.
- `activations`: what the forward pass makes, or the backward pass again with activation checkpointing.
- `logits`: scores of the whole vocabulary, their gradients included.
- `buffers`: the buffers of the model's modules, and tables that its forward pass caches.
- `communication`: what is sent and received: buckets of gradients, and gathered weights in ZeRO stage 3.
- `workspace`: all else, such as the gradients of activations, and copies that the update makes.
"""
CATEGORIES: tuple[Category, ...] = get_args(Category)
_Activity = Literal["forward", "loss", "other"]
_ALIGNMENT = 64
"""The vocabulary's columns may be padded to a multiple of it, as in `fused_linear_cross_entropy`."""


class Activity:
    """Tracks what the rank is doing, which tells what each new tensor is for."""

    def __init__(self, vocab_size: int, has_whole_logits: bool) -> None:
        """Start outside the forward pass and the loss.

        Args:
            has_whole_logits: Logits may be made anywhere, instead of in `fused_linear_cross_entropy` alone.
        """
        self._columns = {vocab_size, -(-vocab_size // _ALIGNMENT) * _ALIGNMENT}
        self._has_whole_logits = has_whole_logits
        self._current: _Activity = "other"

    @contextmanager
    def _during(self, activity: _Activity) -> Iterator[None]:
        before, self._current = self._current, activity
        try:
            yield
        finally:
            self._current = before

    def category_of(self, operation: Any, result: Tensor) -> Category:
        """What a new tensor is for, as far as it is known when it is made."""
        in_loss, shape = self._current == "loss", result.shape
        if len(shape) > 1 and shape[-1] in self._columns and (in_loss or self._has_whole_logits):
            return "logits"
        if in_loss and shape and shape[0] in self._columns:
            # The gradient of the output layer is summed there. The weight that it pads is not a gradient.
            is_weight = operation.overloadpacket is torch.ops.aten.constant_pad_nd
            return "workspace" if is_weight else "gradients"
        return "workspace" if self._current == "other" else "activations"

    @contextmanager
    def observed(self, model: Model) -> Iterator[None]:
        """Follow the forward pass of a model, and that of its layers, which the backward pass may call again."""
        original: Any = output_layer._FusedLinearCrossEntropy

        class Loss(original):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                with self._during("loss"):
                    return original.forward(ctx, *inputs)

        for module in (model, *model.layers):
            module.forward = partial(self._call, module.forward)
        with replaced(output_layer, _FusedLinearCrossEntropy=Loss):
            yield

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._during("forward"):
            return forward(*args, **kwargs)


def lasting_tensors(engine: Engine, stage: int) -> Iterator[tuple[Category, Tensor]]:
    """What there is between steps in a ZeRO stage, with its category; where two name the same memory, the latter one
    holds."""
    for tensor in engine.state()[0].values():
        yield "optimizer_states", tensor
    for bucket in gradient_buckets(engine.zero):
        yield "communication", bucket
    for gradients in accumulated_gradients(engine.zero, stage):
        yield "gradients", gradients
    for parameter in engine.module.parameters():
        yield "parameters", parameter.data
    for part in partitioned_weights(engine.module, stage):
        yield "parameters", part
    for buffer in engine.module.buffers():
        yield "buffers", buffer
