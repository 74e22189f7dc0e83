"""Attention of few queries is scaled dot-product attention."""

import pytest
import torch
from torch.nn import functional as F

from multihop.pretrain.models.cpu.few_queries import few_query_attention


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("masked", ["not", "for all queries", "for each query"])
def test_it_is_torchs(queries: int, masked: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(3, 2, count, 8, generator=generator) for count in (queries, 7, 7))
    key, value = key[:, :, :5], value[:, :, :5]  # of a cache with room
    mask = None
    if masked != "not":
        mask = torch.rand(3, 1, queries if masked == "for each query" else 1, 5, generator=generator) < 0.5
        mask[..., 1] = True
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(few_query_attention(query, key, value, mask), expected)
