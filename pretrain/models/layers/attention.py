"""Attention within packed sequences of any lengths (Vaswani et al. 2017, section 3.2.1)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.models.cpu.blocked_attention import blocked_attention
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.variable_length import Bounds, attend_by_lengths, has_flash_attention
from multihop.pretrain.packed_tokens import PackedTokens

_PADDED = 1 / 8
"""How much shorter than the longest sequence of its bucket a sequence may be."""
_SHORT = 3
"""Up to this many times the window, torch's attention with a mask is faster on a CPU than attention by blocks, which
computes fewer scores."""


@dataclass(frozen=True)
class Sequences:
    """Packed sequences: where each lies in a flat tensor of N tokens."""

    cu_seqlens: Tensor
    """int64 (S + 1,): cumulative sequence lengths, from 0 to N."""
    max_seqlen: int
    """The length of the longest sequence."""
    tokens: int
    """N."""
    cache: KeyValueCache | None = None
    """Keys and values of the tokens before these, where a text is generated."""

    @classmethod
    def of(cls, packed: PackedTokens[Tensor], cache: KeyValueCache | None = None) -> Self:
        """The sequences of packed tokens."""
        return cls(packed.cu_seqlens, packed.max_seqlen, len(packed.input_ids), cache)

    @property
    def equal(self) -> bool:
        """Whether all sequences have the same length."""
        return self.tokens == (len(self.cu_seqlens) - 1) * self.max_seqlen

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of the sequences, which variable-length kernels read."""
        return Bounds(self.cu_seqlens, self.max_seqlen)

    @cached_property
    def buckets(self) -> "list[_Bucket]":
        """Groups of sequences of similar length, for devices without variable-length kernels."""
        starts = self.cu_seqlens[:-1].tolist()
        lengths = self.cu_seqlens.diff().tolist()
        order = sorted(range(len(starts)), key=lambda sequence: -lengths[sequence])
        groups: list[list[int]] = []
        for sequence in order:
            max_seqlen = lengths[groups[-1][0]] if groups else 0
            if groups and lengths[sequence] >= max_seqlen * (1 - _PADDED):
                groups[-1].append(sequence)
            else:
                groups.append([sequence])
        return [
            _bucket([starts[i] for i in group], [lengths[i] for i in group], self.cu_seqlens.device)
            for group in groups
            if lengths[group[0]]
        ]

    @cached_property
    def order(self) -> Tensor:
        """int64 (N,): the position of each token in the concatenated rows of all buckets, padding included."""
        order = torch.empty(self.tokens, dtype=torch.int64, device=self.cu_seqlens.device)
        before = 0
        for bucket in self.buckets:
            length = bucket.at.shape[1]
            positions_in_rows = before + torch.arange(bucket.at.numel(), device=order.device).view_as(bucket.at)
            real = torch.arange(length, device=order.device) < bucket.lengths[:, None]
            order[bucket.at[real]] = positions_in_rows[real]
            before += bucket.at.numel()
        return order


@dataclass(frozen=True)
class _Bucket:
    at: Tensor
    """int64 (B, T): the tokens of B sequences; a shorter one is padded with its last token."""
    lengths: Tensor
    """int64 (B,)."""
    real: Tensor | None
    """bool (B, 1, 1, T), false at the padding; None without padding."""


def _bucket(starts: list[int], lengths: list[int], device: torch.device) -> _Bucket:
    each, columns = torch.tensor(lengths), torch.arange(lengths[0])
    at = torch.tensor(starts)[:, None] + torch.minimum(columns, each[:, None] - 1)
    real = (columns < each[:, None])[:, None, None, :].to(device) if lengths[-1] < lengths[0] else None
    return _Bucket(at.to(device), each.to(device), real)


@torch.compiler.disable
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    causal: bool,
    dropout: float,
    relative: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Scaled dot-product attention of each token to the tokens of its sequence.

    Args:
        query, key, value: (N, heads, width).
        causal: a token attends to itself and those before it only.
        dropout: rate, of the attention weights.
        relative: (N, heads, C), what is added to the products of a query and the keys at each clipped distance; see
            `relative_positions`.
        window: the largest distance of a token to attend to, in tokens; None: any.

    Returns:
        (N, heads, width).
    """
    if window is not None and window >= sequences.max_seqlen - 1:
        window = None
    if sequences.cache is not None:
        sequences.cache.append(key, value)
        if sequences.cache.is_decoding:
            return sequences.cache.attend(query, relative)
    on_gpu = query.device.type == "cuda" and relative is None
    if on_gpu and (not sequences.equal if window is None else has_flash_attention(query)):
        return attend_by_lengths(
            query, key, value, sequences.bounds, sequences.bounds, causal, dropout, window=window
        )
    parts = [query, key, value] if relative is None else [query, key, value, relative]
    if sequences.equal:
        shape = (len(sequences.cu_seqlens) - 1, sequences.max_seqlen)
        dense = (part.view(*shape, *part.shape[1:]).transpose(1, 2) for part in parts)
        return _dense(*dense, mask=None, causal=causal, dropout=dropout, window=window).transpose(1, 2).reshape(query.shape)
    flat = [part.reshape(len(part), -1) for part in parts]
    done = []
    for bucket in sequences.buckets:
        shape = (*bucket.at.shape, query.shape[1], -1)
        dense = (part.index_select(0, bucket.at.flatten()).view(shape).transpose(1, 2) for part in flat)
        # Under a causal mask no token attends to the padding, which comes after it.
        mask = None if causal else bucket.real
        out = _dense(*dense, mask=mask, causal=causal, dropout=dropout, window=window)
        done.append(out.transpose(1, 2).reshape(-1, flat[0].shape[1]))
    return torch.cat(done).index_select(0, sequences.order).view(query.shape)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor | None = None,
    *,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Attention of (B, heads, T, width); mask: bool (B, 1, 1, T), true at the keys to attend to."""
    length = query.shape[2]
    if relative is not None or (dropout > 0 and query.device.type == "cpu"):
        return blocked_attention(query, key, value, relative, mask, causal, dropout, window)
    if window is not None:
        if length > _SHORT * window:
            return blocked_attention(query, key, value, None, mask, causal, dropout, window)
        near = _near(length, window, causal, query.device)
        mask, causal = near if mask is None else near & mask, False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def _near(length: int, window: int, causal: bool, device: torch.device) -> Tensor:
    """bool (T, T), true where a key is at most `window` from a query, and under a causal mask not after it."""
    near = torch.ones(length, length, dtype=torch.bool, device=device).tril_(0 if causal else window)
    return near.triu_(-window)
