"""One vector for each sequence from the states of its tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from multihop.eval.config import EvalConfig
from multihop.eval.model.pooling import HopPooling, max_pool, mean_pool

Lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def states_of(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    x = torch.randn(sum(lengths), 6, generator=generator, dtype=torch.float64).requires_grad_()
    return x, torch.tensor([0, *lengths]).cumsum(0)


@given(lengths=Lengths)
def test_means_and_maxima_are_those_of_each_sequence(lengths: list[int]) -> None:
    x, cu_seqlens = states_of(lengths)
    torch.testing.assert_close(mean_pool(x, cu_seqlens), torch.stack([part.mean(0) for part in x.split(lengths)]))
    torch.testing.assert_close(max_pool(x, cu_seqlens), torch.stack([part.amax(0) for part in x.split(lengths)]))


@given(lengths=Lengths, hops=st.integers(1, 4))
def test_hops_are_those_of_the_equations(lengths: list[int], hops: int) -> None:
    x, cu_seqlens = states_of(lengths)
    pooling = HopPooling(6, hops).double()
    generator = torch.Generator().manual_seed(hops)
    with torch.no_grad():
        for parameter in pooling.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    expected = []
    for part in x.split(lengths):
        u = pooling.query
        for _ in range(hops):
            p = torch.stack([u @ pooling.input @ each for each in part]).div(6**0.5).softmax(0)
            u = pooling.between_hops @ u + sum(w * (pooling.output @ each) for w, each in zip(p, part, strict=True))
        expected.append(u)
    pooled = pooling(x, cu_seqlens)
    torch.testing.assert_close(pooled, torch.stack(expected))
    (gradient,) = torch.autograd.grad((pooled**2).sum(), x, retain_graph=True)
    (reference,) = torch.autograd.grad((torch.stack(expected) ** 2).sum(), x)
    torch.testing.assert_close(gradient, reference)


def test_one_hop_begins_as_the_mean() -> None:
    x, cu_seqlens = states_of([3, 1, 5])
    torch.testing.assert_close(HopPooling(6, 1).double()(x, cu_seqlens), mean_pool(x, cu_seqlens))


@pytest.mark.parametrize("hops", [0, 21])
def test_the_number_of_hops_has_bounds(hops: int) -> None:
    with pytest.raises(ValidationError, match=r"pooling.Hops.hops"):
        EvalConfig.model_validate({"pooling": {"hops": hops}})
