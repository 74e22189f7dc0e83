"""Attention of packed sequences on a GPU by variable-length kernels, without padding."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.models.gpu import can_run

_AMPERE = (8, 0)
"""The lowest compute capability that FlashAttention 2 supports."""
_HALF = (torch.bfloat16, torch.float16)
_HEAD_WIDTHS = range(8, 257, 8)
"""The widths of a head that FlashAttention 2 takes without padding."""

_MAX_SHORT_LENGTH = 128
"""The longest sequence that `gpu.short_attention` takes, in tokens."""
_SHORT_WIDTHS = (16, 32, 64)
"""The head widths that it takes."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of packed sequences."""

    cu_seqlens: Tensor
    """int64 (S + 1,): cumulative sequence lengths, from 0 to N."""
    max_seqlen: int
    """The length of the longest sequence."""

    @cached_property
    def int32(self) -> Tensor:
        """`cu_seqlens` as the kernels read them."""
        return self.cu_seqlens.to(torch.int32)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Bounds,
    keys: Bounds,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of the i-th sequence of queries to the i-th sequence of keys, for each i.

    In bf16 and fp16 it calls FlashAttention 2 directly (Dao 2023). Other dtypes and head widths go through torch's
    jagged tensors, which choose a kernel.

    Args:
        query: (Nq, heads, width); key, value: (Nk, heads, width).
        scale: the factor of the scores; None: width**-0.5.
        window: the maximum distance between a query and a key that it attends to, in tokens; None: no maximum. Only
            where `is_supported_by_flash`.

    Returns:
        (Nq, heads, width).
    """
    if is_supported_by_flash(query):
        # torch.nn.attention.varlen calls the same operation, without dropout.
        out, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            queries.int32,
            keys.int32,
            queries.max_seqlen,
            keys.max_seqlen,
            dropout,
            causal,
            False,
            scale=scale,
            window_size_left=window,
            window_size_right=0 if causal and window is not None else window,
        )
        flash: Tensor = out
        return flash
    assert window is None
    # Without min_seqlen torch would read the smallest length from the device in each call.
    q, k, v = (
        partial(
            torch.nested.nested_tensor_from_jagged,
            offsets=bounds.cu_seqlens,
            min_seqlen=1,
            max_seqlen=bounds.max_seqlen,
        )(part).transpose(1, 2)
        for part, bounds in ((query, queries), (key, keys), (value, keys))
    )
    attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, scale=scale)
    return attended.transpose(1, 2).values()


def is_supported_by_flash(query: Tensor) -> bool:
    """Whether FlashAttention 2 takes queries, (Nq, heads, width), of this dtype and width on their device.

    On the meta device it takes all: the other kernels save as much for the backward pass.
    """
    if query.is_meta:
        return True
    fits = query.dtype in _HALF and query.shape[2] in _HEAD_WIDTHS
    return fits and torch.cuda.get_device_capability(query.device) >= _AMPERE


def is_supported_by_short_attention(query: Tensor, max_seqlen: int) -> bool:
    """Whether `gpu.short_attention` takes queries, (N, heads, width), of sequences of up to `max_seqlen` tokens."""
    fits = max_seqlen <= _MAX_SHORT_LENGTH and query.shape[2] in _SHORT_WIDTHS and query.dtype in _HALF
    return fits and can_run(query) and is_supported_by_flash(query)
