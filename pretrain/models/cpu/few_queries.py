"""Attention of few queries to many keys, during generation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.device_type import device_type


def few_query_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1), without a gradient.

    On a CPU by two products of small matrices: torch's fused attention, which is made for many queries, takes 1.6 to 4
    times as long.

    Args:
        query: (S, heads, Q, width).
        key, value: (S, heads, T, width), each matrix of T rows contiguous.
        mask: bool (S, 1, Q or 1, T), true at the keys to attend to; None: all.

    Returns:
        (S, heads, Q, width).
    """
    if device_type(query.device) != "cpu":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    q, k, v = (part.flatten(0, 1) for part in (query, key, value))
    scores = torch.baddbmm(query.new_zeros(()), q, k.transpose(1, 2), beta=0, alpha=query.shape[-1] ** -0.5)
    if mask is not None:
        scores.view(*query.shape[:3], -1).masked_fill_(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).view(query.shape)
