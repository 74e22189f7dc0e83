"""Norms that do not depend on how a tensor is split, and clipping by them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multihop.pretrain.optim.norms import clip_grad_norm_, squared_norms


@pytest.mark.parametrize("shape", [(30_522, 768), (50_257, 768)], ids=["bert-base", "gpt2"])
def test_a_large_tensor_has_its_norm_however_it_is_split(shape: tuple[int, int]) -> None:
    tensor = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = sum(float(part.double().square().sum()) for part in tensor.split(1000))
    for parts in (1, 2, 8, 64):
        split = squared_norms(tensor.view(-1).chunk(parts))
        assert (len(split), split.dtype) == (parts, torch.float64)
        assert float(split.sum()) == pytest.approx(expected, rel=1e-7)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=1, max_size=5),
    st.sampled_from([1, 100, 1023, 1024, 1025]),
    st.booleans(),
)
def test_each_tensor_has_its_own_norm(shapes: list[list[int]], more: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(more)
    tensors = [torch.randn([*shape, more], generator=generator) for shape in shapes]
    if transposed:
        tensors = [tensor.transpose(0, -1) for tensor in tensors]
    expected = torch.stack([tensor.double().square().sum() for tensor in tensors])
    # Blocks of 1,024 are accumulated in float32 (unit roundoff 6e-8).
    assert torch.allclose(squared_norms(tensors), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2500])
def test_non_finite_values_give_a_non_finite_norm(bad: float, at: int) -> None:
    tensor = torch.ones(2501)
    tensor[at] = bad
    assert not torch.isfinite(squared_norms([tensor])).any()


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
def test_gradients_are_clipped_like_torch_does(max_norm: float) -> None:
    parameters = [torch.zeros(shape, requires_grad=True) for shape in [(40, 30), (7,), (3, 5, 2)]]
    others = [torch.zeros_like(parameter, requires_grad=True) for parameter in parameters]
    for parameter, other in zip(parameters[:-1], others[:-1], strict=True):  # the last one has no gradient
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        other.grad = parameter.grad.clone()
    norm = clip_grad_norm_(iter(parameters), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(others, max_norm or math.inf)
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    for parameter, other in zip(parameters[:-1], others[:-1], strict=True):
        assert parameter.grad is not None and other.grad is not None
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_norms_are_the_same_and_there_is_no_synchronization() -> None:
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 1000, 3_000_000)]
    there = [tensor.cuda() for tensor in tensors]
    torch.cuda.set_sync_debug_mode("error")
    norms = squared_norms(there)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(norms.cpu(), squared_norms(tensors), rtol=3e-7, atol=0)
