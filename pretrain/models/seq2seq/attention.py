"""Attention of a decoder to the encoder's states (Bahdanau et al. 2015, A.1.2; Luong et al. 2015, section 3)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.cross_attention import Pairs, apply_by_bucket

Score = Literal["additive", "dot", "general", "concat"]
_MAX_SUMS = 2**20
"""Maximum number of elements of queries plus keys in memory at a time."""


class Attention(nn.Module):
    """Attention over the source: the mean of the source's states s, weighted by the softmax of a score.

    dot: h . s. general: h . (W s). additive and concat: v . tanh(W h + U s), which is Luong's v . tanh(W [h; s]); they
    differ in which decoder state h is.
    """

    def __init__(self, score: Score, hidden: int) -> None:
        super().__init__()
        self.is_sum = score in ("additive", "concat")
        self.key = None if score == "dot" else nn.Linear(hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden, bias=False) if self.is_sum else None
        self.score = nn.Parameter(torch.empty(1, hidden)) if self.is_sum else None

    def keys(self, source: Tensor) -> Tensor:
        """(…, H) -> (…, H): the keys, from the encoder's outputs."""
        return source if self.key is None else self.key(source)

    def forward(self, query: Tensor, key: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        """Contexts (B, Tq, H).

        Args:
            query: (B, Tq, H); key: (B, Tk, H), from `keys`; source: (B, Tk, H).
            mask: bool (B, Tk), false at the padding; None without padding.
        """
        return torch.bmm(self.weights(query, key, mask), source)

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """The attention weights of each query over the source tokens: (B, Tq, Tk), whose rows sum to 1."""
        if self.query is None or self.score is None:
            scores = torch.bmm(query, key.transpose(1, 2))
        else:
            scores = _SumScores.apply(self.query(query), key, self.score[0])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(-1)

    def attention_map(self, query: Tensor, key: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        """The weights of a single pair, (Tq, Tk); see `EncoderDecoder.last_cross_attention`."""
        return self.weights(query, key, mask)[0]

    def cross_attend(self, query: Tensor, source: Tensor, targets: Sequences, sources: Sequences) -> Tensor:
        """The contexts (Nt, H) of all tokens of packed targets; query is (Nt, H), source (Ns, H)."""
        return apply_by_bucket(query, self.keys(source), source, Pairs(targets, sources), self)


class _SumScores(torch.autograd.Function):
    """v . tanh(q + k) for each pair of a query and a key. The tanh, H elements per pair, is recomputed backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, v)
        scores = query.new_empty(query.shape[0], query.shape[1], key.shape[1])
        for part in _parts(query, key):
            scores[:, part] = _tanh(query, key, part) @ v
        return scores

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, v = ctx.saved_tensors
        grad_query, grad_key, grad_v = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(v)
        for part in _parts(query, key):
            tanh, grad = _tanh(query, key, part), gradients[0][:, part]
            grad_v += grad.reshape(-1) @ tanh.flatten(0, 2)
            inner = tanh.square_().neg_().add_(1).mul_(v).mul_(grad[..., None])
            grad_query[:, part] = inner.sum(2)
            grad_key += inner.sum(1)
        return grad_query, grad_key, grad_v


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    queries = max(1, _MAX_SUMS // max(1, key.numel()))
    return [slice(start, start + queries) for start in range(0, query.shape[1], queries)]


def _tanh(query: Tensor, key: Tensor, part: slice) -> Tensor:
    """(B, part, Tk, H)."""
    return (query[:, part, None] + key[:, None]).tanh_()
