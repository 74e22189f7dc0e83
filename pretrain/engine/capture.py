"""Captures a model's last hidden states, and the queries and keys of its attention, from outside while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from multihop.pretrain.models.build import Model
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import SelfAttention, select_tokens
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder
from multihop.pretrain.models.layers.rotary import rotate
from multihop.pretrain.uncompiled import is_compiler_loaded

OnStates = Callable[[Tensor], None]
"""Takes the last hidden states (N, H) of all tokens of a micro-batch; for an encoder-decoder, of its targets."""
OnAttention = Callable[[Tensor, Tensor, Tensor | None, Sequences, bool, int | None], None]
"""Takes the queries and keys of an attention module, (N, heads, width) each, the terms of relative positions, (N,
heads, C) or None, the sequences, whether attention is causal, and its window, in tokens or None."""


@contextmanager
def capture_activations(model: Model, on_states: OnStates, on_attention: OnAttention) -> Iterator[None]:
    """Within the context, call `on_attention` for each attention of a forward pass, and `on_states` at its end.

    The states are those of all tokens, even if the model's `forward` needs only some. Weights are never read here:
    under ZeRO-3 they exist only while their module runs. Compiled layers run uncompiled within the context, because
    compiled code does not call hooks that are registered later.
    """
    hooks = [
        hook
        for module in model.modules()
        if isinstance(module, SelfAttention)
        for hook in _hook_attention(module, on_attention)
    ]
    patched: Any = model
    if isinstance(model, EncoderDecoder):
        patched.decode_targets = _with_callback(model.decode_targets, on_states)
    else:
        patched.encode = _with_callback(model.encode, on_states)
    try:
        with torch.compiler.set_stance("force_eager") if is_compiler_loaded() else nullcontext():
            yield
    finally:
        for name in ("encode", "decode_targets"):
            vars(model).pop(name, None)
        for hook in hooks:
            hook.remove()


def _with_callback(encode: Callable[..., Tensor], on_states: OnStates) -> Callable[..., Tensor]:
    def encode_all(*inputs: Any, token_indices: Tensor | None = None, **others: Any) -> Tensor:
        states = encode(*inputs, **others)
        on_states(states)
        return select_tokens(states, token_indices)

    return encode_all


def _hook_attention(attention: SelfAttention, on_attention: OnAttention) -> list[torch.utils.hooks.RemovableHandle]:
    projected: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _, __, output: projected.__setitem__(name, output.view(len(output), attention.heads, -1))

    def report(_: nn.Module, inputs: tuple[Any, ...], __: Tensor) -> None:
        query, key, relative = projected.pop("query"), projected.pop("key"), projected.pop("distance", None)
        _, sequences, _, rotation = (*inputs, None, None)[:4]
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        on_attention(query, key, relative, sequences, attention.causal, attention.window)

    parts = {"query": attention.query, "key": attention.key, "distance": attention.distance}
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items() if part is not None]
    return [*hooks, attention.register_forward_hook(report)]
