"""The kernel that turns logits into their gradient computes the cross-entropy and its gradient."""

import pytest
import torch
from torch.nn import functional as F

from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary", "padding"), [(5, 61, 3), (33, 128, 0), (2, 7, 57), (9, 20_001, 31)])
def test_it_is_torchs(rows: int, vocabulary: int, padding: int, dtype: torch.dtype, label_smoothing: float) -> None:
    from multihop.pretrain.models.gpu.softmax_gradient import softmax_gradient_  # needs Triton

    generator = torch.Generator().manual_seed(1)
    logits = (8 * torch.randn(rows, vocabulary + padding, generator=generator)).to("cuda", dtype)
    logits[:, vocabulary:] = torch.nan  # whatever was in the memory
    targets = torch.randint(0, vocabulary, (rows,), generator=generator).cuda()
    wide = logits[:, :vocabulary].float().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="sum", label_smoothing=label_smoothing)
    (gradient,) = torch.autograd.grad(expected, wide)
    loss = softmax_gradient_(logits, targets, vocabulary, label_smoothing)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=0)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(logits[:, :vocabulary].float(), gradient, rtol=tolerance, atol=1e-6)
    assert (logits[:, vocabulary:] == 0).all()


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
