"""Relative positions in attention (Shaw et al. 2018), without a vector for each pair of tokens.

The score of query i for key j is q_i · (k_j + a_c) / sqrt(width), with c = clip(j - i, -k, k) (equation 4). Values get
no embeddings: with those of the keys they gained nothing (table 3). The a_c of all pairs would be an (n, n, width)
tensor; instead q_i · a_c is computed for the few clipped distances, and expanded to all keys (Huang et al. 2018,
section 3.4).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def expand_by_distance(products: Tensor, rows: Tensor, keys: int, causal: bool) -> Tensor:
    """Expand products for each clipped distance to all keys: each key gets that of its distance from the query.

    Args:
        products: (..., R, C), the products of R queries with the embeddings of the distances, from the farthest one
            back to the farthest one ahead.
        rows: int64, of a shape that expands to (..., R): the positions of the queries.
        keys: number of keys, whose positions are 0, 1, …

    Returns:
        (..., R, keys).
    """
    count = products.shape[-1]
    columns = torch.arange(keys, device=rows.device)
    each = (columns - rows[..., None] + _farthest(count, causal)).clamp(0, count - 1)
    return products.gather(-1, each.expand(*products.shape[:-1], keys))


def sum_by_distance(gradient: Tensor, first: int, count: int, causal: bool) -> Tensor:
    """The gradient of `expand_by_distance` for consecutive queries: sums over the keys of the same clipped distance.

    The rows are skewed so that each distance is a column; a scatter would take several times as long, and its sums
    would not be deterministic on a GPU.

    Args:
        gradient: (B, R, keys), for the queries at positions first, first + 1, …, all of which are positions of keys.

    Returns:
        (B, R, count).
    """
    farthest = _farthest(count, causal)
    padded = F.pad(gradient, (farthest, count - 1 - farthest))
    batch, rows, width = padded.shape
    sums = padded.as_strided((batch, rows, count), (rows * width, width + 1, 1), first).clone()
    sums[..., 0] = gradient.tril(first - farthest).sum(-1)
    if not causal:
        sums[..., -1] = gradient.triu(first + farthest).sum(-1)
    return sums


def _farthest(count: int, causal: bool) -> int:
    """The largest distance k, from the number of clipped distances."""
    return count - 1 if causal else count // 2
