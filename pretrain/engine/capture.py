"""A model's last hidden states and its attention's queries and keys, seen from outside while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multihop.pretrain.models.build import Model
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import SelfAttention, select_tokens
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder

SeeStates = Callable[[Tensor], None]
"""Takes the last hidden states (N, H) of all tokens of a micro-batch; of pairs those of the targets."""
SeeAttention = Callable[[Tensor, Tensor, Tensor | None, Sequences, bool], None]
"""Takes an attention's queries and keys, (N, heads, width) each, what relative positions add to their products, (N,
heads, C) or None, their sequences, and whether it is causal."""


@contextmanager
def capture_activations(model: Model, see_states: SeeStates, see_attention: SeeAttention) -> Iterator[None]:
    """Until the context ends, `model` shows each forward pass what it computes, once a layer is applied and at its end.

    The states are those of all tokens, also where the model's `forward` asks for those of some only. Weights are never
    read here: under ZeRO-3 they exist only while their module runs. Compiled layers run uncompiled meanwhile, because
    what is compiled calls no hooks that come later.
    """
    hooks = [
        hook
        for module in model.modules()
        if isinstance(module, SelfAttention)
        for hook in _watch(module, see_attention)
    ]
    changed: Any = model
    if isinstance(model, EncoderDecoder):
        changed.decode_targets = _showing(model.decode_targets, see_states)
    else:
        changed.encode = _showing(model.encode, see_states)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for name in ("encode", "decode_targets"):
            vars(model).pop(name, None)
        for hook in hooks:
            hook.remove()


def _showing(encode: Callable[..., Tensor], see_states: SeeStates) -> Callable[..., Tensor]:
    def encode_all(*inputs: Any, token_indices: Tensor | None = None, **others: Any) -> Tensor:
        states = encode(*inputs, **others)
        see_states(states)
        return select_tokens(states, token_indices)

    return encode_all


def _watch(attention: SelfAttention, see: SeeAttention) -> list[torch.utils.hooks.RemovableHandle]:
    projected: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, __, output: projected.__setitem__(name, output.view(len(output), attention.heads, -1))

    def show(_: nn.Module, given: tuple[Any, ...], __: Tensor) -> None:
        see(projected.pop("query"), projected.pop("key"), projected.pop("distance", None), given[1], attention.causal)

    parts = {"query": attention.query, "key": attention.key, "distance": attention.distance}
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items() if part is not None]
    return [*hooks, attention.register_forward_hook(show)]
