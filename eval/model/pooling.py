"""One vector for each sequence from the states of all its tokens: mean, maxima, both, or hops of attention."""

import torch
from torch import Tensor, nn


def means(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens: (N, H) -> (S, H)."""
    lengths = cu_seqlens.diff()
    owners = torch.repeat_interleave(lengths)
    return x.new_zeros(len(lengths), x.shape[1]).index_add(0, owners, x) / lengths[:, None]


def maxima(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the maximum of each dimension over each sequence's tokens: (N, H) -> (S, H)."""
    lengths = cu_seqlens.diff()
    owners = torch.repeat_interleave(lengths)[:, None].expand_as(x)
    return x.new_zeros(len(lengths), x.shape[1]).scatter_reduce(0, owners, x, "amax", include_self=False)


def concatenated(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the last token's state, the maxima and the mean of each sequence, (N, H) -> (S, 3 * H) (Howard and Ruder
    2018, section 3.3)."""
    return torch.cat([x.index_select(0, cu_seqlens[1:] - 1), maxima(x, cu_seqlens), means(x, cu_seqlens)], 1)


class HopPooling(nn.Module):
    """Hops of attention over a sequence's states: u <- H u + sum_i p_i C x_i, where p is the softmax of u . A x_i
    (Sukhbaatar et al. 2015, sections 2.1 and 2.2, layer-wise tying: all hops have the same matrices).

    In place of the paper's question, u begins as a learned vector. That vector begins at 0, and the matrices as
    identities, so that the first hop begins as the mean of the states. Scores are divided by sqrt(H), because states,
    other than the paper's embeddings, are long.
    """

    def __init__(self, hidden: int, hops: int) -> None:
        super().__init__()
        self.hops = hops
        self.query = nn.Parameter(torch.zeros(hidden))
        self.input = nn.Parameter(torch.eye(hidden))
        self.output = nn.Parameter(torch.eye(hidden))
        self.between_hops = nn.Parameter(torch.eye(hidden))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Pool the states of packed sequences: (N, H) -> (S, H)."""
        lengths = cu_seqlens.diff()
        owners = torch.repeat_interleave(lengths)
        keys, values = x @ self.input.T / x.shape[1] ** 0.5, x @ self.output.T
        u = self.query.expand(len(lengths), -1)
        for _ in range(self.hops):
            p = softmax_by_sequence((keys * u[owners]).sum(1), owners, len(lengths))
            u = (u @ self.between_hops.T).index_add(0, owners, p[:, None] * values)
        return u


def softmax_by_sequence(scores: Tensor, owners: Tensor, sequences: int) -> Tensor:
    """Return the softmax of scores (N,) over the tokens of each sequence; owners: int64 (N,), each token's sequence."""
    highest = scores.new_zeros(sequences).scatter_reduce(0, owners, scores.detach(), "amax", include_self=False)
    weights = (scores - highest[owners]).exp()
    return weights / weights.new_zeros(sequences).index_add(0, owners, weights)[owners]
