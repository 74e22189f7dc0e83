"""The passes over the logits that a GPU makes, compiled for a CPU, are the cross-entropy and its gradient."""

from collections.abc import Callable

import pytest
import torch
from rank_jobs import compiled_gradients
from rank_pool import RankPool
from torch.nn import functional as F

from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy


@pytest.mark.ranks
@pytest.mark.parametrize(("dtype", "label_smoothing"), [(torch.float32, 0.0), (torch.bfloat16, 0.1)])
def test_it_is_torchs(pool: Callable[[int], RankPool], dtype: torch.dtype, label_smoothing: float) -> None:
    generator, cases, expected = torch.Generator().manual_seed(1), [], []
    for rows, vocabulary, padding in ((5, 61, 3), (33, 128, 0), (2, 7, 57)):
        logits = (8 * torch.randn(rows, vocabulary + padding, generator=generator)).to(dtype)
        logits[:, vocabulary:] = torch.nan  # whatever was in the memory
        targets = torch.randint(0, vocabulary, (rows,), generator=generator)
        cases.append((logits, targets, vocabulary))
        wide = logits[:, :vocabulary].float().requires_grad_()
        loss = F.cross_entropy(wide, targets, reduction="sum", label_smoothing=label_smoothing)
        expected.append((loss.detach(), *torch.autograd.grad(loss, wide)))
    (found,) = pool(1).run(compiled_gradients, cases, label_smoothing)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    for (loss, gradient), (true_loss, true_gradient) in zip(found, expected, strict=True):
        assert loss.dtype == torch.float32 and gradient.dtype == dtype
        vocabulary = true_gradient.shape[1]
        torch.testing.assert_close(loss, true_loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient[:, :vocabulary].float(), true_gradient, rtol=tolerance, atol=1e-6)
        assert (gradient[:, vocabulary:] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_loss_of_a_cpu(dtype: torch.dtype, label_smoothing: float) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator).to(dtype) for shape in ((300, 64), (1001, 64), (1001,))]
    targets = torch.randint(0, 1001, (300,), generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        mine = [part.to(device).requires_grad_() for part in parts]
        loss = fused_linear_cross_entropy(*mine, targets.to(device), label_smoothing)
        found.append([loss, *torch.autograd.grad(loss, mine)])
    for here, there in zip(*found, strict=True):
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
        scale = float(here.detach().abs().max())
        torch.testing.assert_close(there.cpu().float(), here.float(), rtol=tolerance, atol=tolerance * scale)
