"""Attention within packed sequences of any lengths (Vaswani et al. 2017, section 3.2.1)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.device_type import device_type
from multihop.pretrain.models.cpu.blocked_attention import blocked_attention
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.varlen_attention import (
    Bounds,
    is_supported_by_flash,
    is_supported_by_short_attention,
    varlen_attention,
)
from multihop.pretrain.packed_tokens import PackedTokens
from multihop.pretrain.uncompiled import uncompiled

_MAX_PADDING_RATIO = 1 / 8
"""The most padding that a sequence may get in its bucket, as a share of the longest sequence."""
_SHORT = 3
"""Up to this many times the window, torch's attention with a mask is faster on a CPU than attention by blocks, which
computes fewer scores."""


@dataclass(frozen=True)
class Sequences:
    """The bounds of packed sequences in a flat tensor of N tokens."""

    cu_seqlens: Tensor
    """int64 (S + 1,): cumulative sequence lengths, from 0 to N."""
    max_seqlen: int
    """The length of the longest sequence."""
    tokens: int
    """N."""
    cache: KeyValueCache | None = None
    """Keys and values of the preceding tokens, during generation."""

    @classmethod
    def of(cls, packed: PackedTokens[Tensor], cache: KeyValueCache | None = None) -> Self:
        """The sequences of packed tokens."""
        return cls(packed.cu_seqlens, packed.max_seqlen, len(packed.input_ids), cache)

    @property
    def equal_lengths(self) -> bool:
        """Whether all sequences have the same length."""
        return self.tokens == (len(self.cu_seqlens) - 1) * self.max_seqlen

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of the sequences for variable-length kernels."""
        return Bounds(self.cu_seqlens, self.max_seqlen)

    @cached_property
    def buckets(self) -> "list[_Bucket]":
        """Groups of sequences of similar length, for devices without variable-length kernels."""
        starts = self.cu_seqlens[:-1].tolist()
        lengths = self.cu_seqlens.diff().tolist()
        order = sorted(range(len(starts)), key=lambda sequence: -lengths[sequence])
        groups: list[list[int]] = []
        for sequence in order:
            longest = lengths[groups[-1][0]] if groups else 0
            if groups and lengths[sequence] >= longest * (1 - _MAX_PADDING_RATIO):
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
        """int64 (N,): the position of each token in the flattened, concatenated buckets, padding included."""
        order = torch.empty(self.tokens, dtype=torch.int64, device=self.cu_seqlens.device)
        first = 0
        for bucket in self.buckets:
            indices = bucket.indices
            positions = first + torch.arange(indices.numel(), device=order.device).view_as(indices)
            mask = torch.arange(indices.shape[1], device=order.device) < bucket.lengths[:, None]
            order[indices[mask]] = positions[mask]
            first += indices.numel()
        return order


@dataclass(frozen=True)
class _Bucket:
    indices: Tensor
    """int64 (B, T): the tokens of B sequences; shorter ones are padded with their last tokens."""
    lengths: Tensor
    """int64 (B,)."""
    mask: Tensor | None
    """bool (B, 1, 1, T), false at the padding; None without padding."""


def _bucket(starts: list[int], lengths: list[int], device: torch.device) -> _Bucket:
    each, columns = torch.tensor(lengths), torch.arange(lengths[0])
    indices = torch.tensor(starts)[:, None] + torch.minimum(columns, each[:, None] - 1)
    mask = (columns < each[:, None])[:, None, None, :].to(device) if lengths[-1] < lengths[0] else None
    return _Bucket(indices.to(device), each.to(device), mask)


@uncompiled
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
        causal: whether a token attends only to itself and the tokens before it.
        dropout: the dropout rate of the attention weights.
        relative: (N, heads, C), the terms that each query adds to the scores of keys at each clipped distance; see
            `relative_positions`.
        window: the maximum distance between a token and those that it attends to, in tokens; None: no maximum.

    Returns:
        (N, heads, width).
    """
    if window is not None and window >= sequences.max_seqlen - 1:
        window = None
    if sequences.cache is not None:
        sequences.cache.append(key, value)
        if sequences.cache.is_decoding:
            return sequences.cache.attend(query, relative)
    if device_type(query.device) == "cuda" and relative is None:
        if window is None and is_supported_by_short_attention(query, sequences.max_seqlen):
            from multihop.pretrain.models.gpu.short_attention import short_attention  # needs Triton

            return short_attention(query, key, value, sequences.bounds.int32, sequences.max_seqlen, causal, dropout)
        # torch has no kernel for equal lengths on the meta device; these take as much memory.
        is_varlen = query.is_meta or not sequences.equal_lengths if window is None else is_supported_by_flash(query)
        if is_varlen:
            bounds = sequences.bounds
            return varlen_attention(query, key, value, bounds, bounds, causal, dropout, window=window)
    parts = [query, key, value] if relative is None else [query, key, value, relative]
    if sequences.equal_lengths:
        shape = (len(sequences.cu_seqlens) - 1, sequences.max_seqlen)
        dense = (part.view(*shape, *part.shape[1:]).transpose(1, 2) for part in parts)
        return (
            _dense(*dense, mask=None, causal=causal, dropout=dropout, window=window)
            .transpose(1, 2)
            .reshape(query.shape)
        )
    flat = [part.reshape(len(part), -1) for part in parts]
    attended = []
    for bucket in sequences.buckets:
        shape = (*bucket.indices.shape, query.shape[1], -1)
        dense = (part.index_select(0, bucket.indices.flatten()).view(shape).transpose(1, 2) for part in flat)
        # Under a causal mask no token attends to the padding, which comes after it.
        mask = None if causal else bucket.mask
        out = _dense(*dense, mask=mask, causal=causal, dropout=dropout, window=window)
        attended.append(out.transpose(1, 2).reshape(-1, flat[0].shape[1]))
    return torch.cat(attended).index_select(0, sequences.order).view(query.shape)


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
    if relative is not None or (dropout > 0 and device_type(query.device) == "cpu"):
        return blocked_attention(query, key, value, relative, mask, causal, dropout, window)
    if window is not None:
        if length > _SHORT * window:
            return blocked_attention(query, key, value, None, mask, causal, dropout, window)
        near = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_(0 if causal else window)
        near.triu_(-window)
        mask, causal = near if mask is None else near & mask, False
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)
