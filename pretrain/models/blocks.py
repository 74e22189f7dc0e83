"""What BERT and GPT-2 share."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """x: (B, T, H); mask: bool (B, 1, 1, T), true where there is a piece to attend to; returns (B, T, H)."""
        batch, length, hidden = x.shape

        def split(projected: Tensor) -> Tensor:
            return projected.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

        context = F.scaled_dot_product_attention(
            split(self.query(x)),
            split(self.key(x)),
            split(self.value(x)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.output(context.transpose(1, 2).reshape(batch, length, hidden))


class FeedForward(nn.Module):
    """Two projections with a GELU between them; GPT-2 uses its tanh approximation."""

    def __init__(self, hidden: int, intermediate: int, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.up = nn.Linear(hidden, intermediate)
        self.down = nn.Linear(intermediate, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (B, T, H)."""
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def padding_mask(lengths: Tensor, length: int) -> Tensor | None:
    """bool (B, 1, 1, T), true at the pieces of each sequence; None where no sequence is padded.

    Args:
        lengths: int64 (B,), pieces of each sequence.
        length: T.
    """
    if bool((lengths == length).all()):
        return None
    positions = torch.arange(length, device=lengths.device)
    return (positions[None, :] < lengths[:, None])[:, None, None, :]
