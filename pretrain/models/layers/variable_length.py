"""Attention of packed sequences on a GPU, by kernels for variable lengths: no padding is computed."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

_AMPERE = (8, 0)
"""The least compute capability that FlashAttention 2 runs on,"""
_WIDTHS = range(8, 257, 8)
"""and the widths of a head that it takes without padding."""


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


def attend_by_lengths(
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
    """Attention of each sequence of queries to the sequence of keys of the same number.

    In bf16 and fp16 FlashAttention 2 is called directly (Dao 2023). Other types and widths of heads go through torch's
    jagged tensors, which choose a kernel.

    Args:
        query: (Nq, heads, width); key, value: (Nk, heads, width).
        scale: of the scores; None: width**-0.5.
        window: the largest distance of a key to attend to, in tokens; None: any. Only where `has_flash_attention`.

    Returns:
        (Nq, heads, width).
    """
    if has_flash_attention(query):
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
    # torch wants to know that no sequence is empty, and would read the smallest length from the device in each call.
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


def has_flash_attention(query: Tensor) -> bool:
    """Whether FlashAttention 2 takes queries, (Nq, heads, width), of this type and width on this device."""
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return narrow and query.shape[2] in _WIDTHS and torch.cuda.get_device_capability(query.device) >= _AMPERE
