"""Attention between packed sequences of two sets of lengths, against the formula with masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.cross_attention import Pairs, cross_attend

Lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=9)


def pairs_of(lengths: list[tuple[int, int]]) -> Pairs:
    sides = []
    for side in zip(*lengths, strict=True):
        sides.append(Sequences(torch.tensor([0, *side]).cumsum(0), max(side), sum(side)))
    return Pairs(*sides)


def inputs(lengths: list[tuple[int, int]], width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    sizes = [sum(each[0] for each in lengths), *[sum(each[1] for each in lengths)] * 2]
    return [torch.randn(n, 2, width, generator=generator, dtype=torch.float64, requires_grad=True) for n in sizes]


def masked(parts: list[Tensor], pairs: Pairs, scale: float) -> Tensor:
    """Return attention of every query to every key, with those of other pairs at minus infinity."""
    of_query, of_key = (torch.repeat_interleave(side.cu_seqlens.diff()) for side in (pairs.queries, pairs.keys))
    query, key, value = parts
    scores = torch.einsum("qhw,khw->hqk", query, key) * scale
    scores = scores.masked_fill(of_query[:, None] != of_key, -torch.inf)
    return torch.einsum("hqk,khw->qhw", scores.softmax(-1), value)


@settings(max_examples=40)
@given(lengths=Lengths, equal=st.booleans())
def test_attention_stays_within_each_pair(lengths: list[tuple[int, int]], equal: bool) -> None:
    if equal:
        lengths = [lengths[0]] * len(lengths)
    pairs, parts = pairs_of(lengths), inputs(lengths)
    for scale in (None, 1.0):
        found, expected = cross_attend(*parts, pairs, scale), masked(parts, pairs, scale or 0.5)
        torch.testing.assert_close(found, expected)
        upstream = torch.randn(expected.shape, dtype=torch.float64)
        for ours, theirs in zip(
            torch.autograd.grad(found, parts, upstream), torch.autograd.grad(expected, parts, upstream), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


@settings(max_examples=40)
@given(lengths=Lengths)
def test_buckets_hold_each_pair_once_with_little_padding(lengths: list[tuple[int, int]]) -> None:
    pairs = pairs_of(lengths)
    for side, bucket_side in ((pairs.queries, "queries"), (pairs.keys, "keys")):
        batches = [getattr(bucket, bucket_side) for bucket in pairs.buckets]
        masks = [torch.ones_like(b.indices, dtype=torch.bool) if b.mask is None else b.mask for b in batches]
        tokens = torch.cat([batch.indices[mask] for batch, mask in zip(batches, masks, strict=True)])
        assert sorted(tokens.tolist()) == list(range(side.tokens))
        for mask in masks:
            width = mask.shape[1]
            assert (mask.sum(1) >= min(width - 4, width * 7 / 8)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_variable_length_kernels_agree_with_the_fallback_on_a_cpu() -> None:
    lengths = [(5, 9), (1, 33), (64, 2)]
    pairs, parts = pairs_of(lengths), inputs(lengths, width=64)
    here = cross_attend(*parts, pairs)
    upstream = torch.randn(here.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(here, parts, upstream)
    there = [part.detach().to("cuda", torch.bfloat16).requires_grad_() for part in parts]
    on_gpu = Pairs(
        *(Sequences(side.cu_seqlens.cuda(), side.max_seqlen, side.tokens) for side in (pairs.queries, pairs.keys))
    )
    out = cross_attend(*there, on_gpu)
    found = torch.autograd.grad(out, there, upstream.to("cuda", torch.bfloat16))
    for ours, theirs in zip((out, *found), (here, *wanted), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=5e-2, atol=5e-2)
