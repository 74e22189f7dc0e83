"""One vector for each sequence from the states of all its tokens: mean, maxima, both, or hops of attention."""

import torch
from torch import Tensor, nn


def mean_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the mean over each sequence's tokens: (N, H) -> (S, H)."""
    lengths = cu_seqlens.diff()
    sequence_ids = torch.repeat_interleave(lengths)
    return x.new_zeros(len(lengths), x.shape[1]).index_add(0, sequence_ids, x) / lengths[:, None]


def max_pool(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the maximum of each dimension over each sequence's tokens: (N, H) -> (S, H)."""
    lengths = cu_seqlens.diff()
    sequence_ids = torch.repeat_interleave(lengths)[:, None].expand_as(x)
    return x.new_zeros(len(lengths), x.shape[1]).scatter_reduce(0, sequence_ids, x, "amax", include_self=False)


def concat_pool(x: Tensor, cu_seqlens: Tensor, reads_backward: bool = False) -> Tensor:
    """Return the state of the token that is read last, the maxima and the mean of each sequence, (N, H) -> (S, 3 * H)
    (Howard and Ruder 2018, section 3.3).

    Args:
        reads_backward: whether the first token of a sequence is read last.
    """
    last = cu_seqlens[:-1] if reads_backward else cu_seqlens[1:] - 1
    return torch.cat([x.index_select(0, last), max_pool(x, cu_seqlens), mean_pool(x, cu_seqlens)], 1)


class HopPooling(nn.Module):
    """Hops of attention over a sequence's states: u <- H u + sum_i p_i C x_i, where p is the softmax of u . A x_i
    (Sukhbaatar et al. 2015, sections 2.1 and 2.2, layer-wise tying: all hops have the same matrices).

    In place of the paper's question, u begins as a learned vector. That vector begins at 0, and the matrices as
    identities, so that the first hop begins as the mean of the states. Scores are divided by sqrt(H), because states,
    unlike the paper's embeddings, have large norms.
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
        sequence_ids = torch.repeat_interleave(lengths)
        keys, values = x @ self.input.T / x.shape[1] ** 0.5, x @ self.output.T
        u = self.query.expand(len(lengths), -1)
        for _ in range(self.hops):
            p = softmax_by_sequence((keys * u[sequence_ids]).sum(1), sequence_ids, len(lengths))
            u = (u @ self.between_hops.T).index_add(0, sequence_ids, p[:, None] * values)
        return u


def softmax_by_sequence(scores: Tensor, sequence_ids: Tensor, sequences: int) -> Tensor:
    """Return the softmax of scores (N,) over the tokens of each sequence.

    Args:
        sequence_ids: int64 (N,), the sequence of each token.
        sequences: number of sequences.
    """
    highest = scores.new_zeros(sequences).scatter_reduce(0, sequence_ids, scores.detach(), "amax", include_self=False)
    weights = (scores - highest[sequence_ids]).exp()
    return weights / weights.new_zeros(sequences).index_add(0, sequence_ids, weights)[sequence_ids]
