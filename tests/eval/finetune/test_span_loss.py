"""The loss over packed sequences, compared with one over padded sequences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from multihop.eval.finetune.spans import span_loss


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32), st.sampled_from([1.0, 300.0]))
def test_the_loss_and_its_gradient_are_those_of_padded_sequences(lengths: list[int], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(sum(lengths), 2, generator=generator) * scale).requires_grad_()
    positions = [torch.tensor([int(torch.randint(n, (1,), generator=generator)) for n in lengths]) for _ in range(2)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    loss = span_loss(logits, *positions, cu_seqlens)
    [gradient] = torch.autograd.grad(loss, logits)

    padded = torch.nn.utils.rnn.pad_sequence(logits.split(lengths), batch_first=True, padding_value=-torch.inf)
    reference = sum(F.cross_entropy(padded[:, :, i], positions[i]) for i in range(2)) / 2
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-6)
    assert torch.allclose(gradient, torch.autograd.grad(reference, logits)[0], atol=1e-6)


def test_half_precision_is_summed_in_fp32() -> None:
    logits = torch.zeros(4096, 2, dtype=torch.bfloat16)
    position = torch.tensor([7])
    loss = span_loss(logits, position, position, torch.tensor([0, 4096]))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(8.317766, abs=1e-5)
