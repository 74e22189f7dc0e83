"""Products with packed weights equal torch's own up to rounding, and are used where they should be."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import profile

from multihop.eval.inference.packed_weights import PackedWeights


class Tied(nn.Module):
    """A layer, and an embedding that is also the output matrix."""

    def __init__(self, width: int = 24, vocabulary: int = 40) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.layer(x), self.word.weight)


def products(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Return the output, and how many products used packed weights."""
    with torch.inference_mode(), PackedWeights(model), profile() as traced:
        out = model(x)
    return out, sum(event.count for event in traced.key_averages() if event.key == "mkldnn::_linear_pointwise")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN packs nothing")
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_both_products_take_packed_weights(rows: int) -> None:
    model, x = Tied(), torch.randn(rows, 24)
    out, packed = products(model, x)
    torch.testing.assert_close(out, model(x).detach(), rtol=1e-5, atol=1e-5)
    assert packed == 2


def test_other_types_are_torchs_own() -> None:
    model, x = Tied().to(torch.bfloat16), torch.randn(4, 24, dtype=torch.bfloat16)
    out, packed = products(model, x)
    assert packed == 0
    assert torch.equal(out, model(x).detach())
