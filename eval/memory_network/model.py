"""Several end-to-end memory networks at once (Sukhbaatar et al. 2015): the same model from different initial weights.

The networks share nothing but the operations of a step: each parameter has a first dimension R, the number of networks.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from multihop.common.counter_rng import key_of

_STD = 0.1
"""Standard deviation of the initial weights (section 4.2)."""

Tying = Literal["adjacent", "layerwise"]


@dataclass(frozen=True)
class NetworkSizes:
    """The sizes of a memory network."""

    vocab_size: int
    """Number of words, with the padding word 0."""
    sentence_words: int
    """J, the number of words of the longest sentence."""
    memories: int
    """The number of memories, of which those beyond a story's statements are empty."""
    times: int
    """Number of temporal encodings: more than `memories` if times are noisy."""
    width: int
    """d, the width of the internal state."""
    hops: int
    tying: Tying = "adjacent"
    """adjacent: the output embedding of a hop is the input embedding of the next; layerwise: all hops have the same
    two embeddings, and a linear map between them (section 2.2)."""


class MemoryNetworks(nn.Module):
    """R networks: u <- H u + o, where o = sum_i p_i c_i and p = softmax(u . m) over the memories (equations 1 to 4).

    With adjacent tying H is the identity, the question's embedding is the first input embedding, and the answer's
    matrix the last output embedding.
    """

    def __init__(self, sizes: NetworkSizes, networks: int, seed: int) -> None:
        super().__init__()
        self.sizes, self.networks = sizes, networks
        adjacent = sizes.tying == "adjacent"
        tables = sizes.hops + 1 if adjacent else 2
        self.word_embeddings = nn.ParameterList(
            _empty_parameter(networks, sizes.vocab_size, sizes.width) for _ in range(tables)
        )
        self.temporal_embeddings = nn.ParameterList(
            _empty_parameter(networks, sizes.times, sizes.width) for _ in range(tables)
        )
        if not adjacent:
            self.question_words = _empty_parameter(networks, sizes.vocab_size, sizes.width)
            self.answer_words = _empty_parameter(networks, sizes.vocab_size, sizes.width)
            self.between_hops = _empty_parameter(networks, sizes.width, sizes.width)
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(key_of("memory network", seed, name) >> 1)
            nn.init.normal_(parameter, std=_STD, generator=generator)
        self.position: Tensor
        self.register_buffer("position", _centered(sizes.sentence_words), persistent=False)
        self.dimension: Tensor
        self.register_buffer("dimension", _centered(sizes.width), persistent=False)

    def forward(
        self, sentences: Tensor, memories: Tensor, times: Tensor, questions: Tensor, linear: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        """Answer B questions with each network.

        Args:
            sentences: int64 (R, U, J), word ids, 0 where there is none; sentence 0 of each network is empty. With a
                first dimension of 1 all networks have the same.
            memories: int64 (R, B, M), the sentence in each memory; 0: the memory is empty.
            times: int64 (R, B, M), the temporal encoding of each memory.
            questions: int64 (R, B), the question's sentence.
            linear: leave out the softmax over the memories (linear start, section 4.1).

        Returns:
            Logits (R, B, V) of the answers, and for each hop the attention (R, B, M) over the memories; what is missing
            from a sum of 1 is at empty memories.
        """
        hops, adjacent = self.sizes.hops, self.sizes.tying == "adjacent"
        filled = memories > 0
        counts = self._word_counts(sentences)
        vectors = [self._sentence_vectors(counts, words) for words in self.word_embeddings]
        question_vectors = vectors[0] if adjacent else self._sentence_vectors(counts, self.question_words)
        u = question_vectors.gather(1, questions[..., None].expand(-1, -1, self.sizes.width))
        attention: list[Tensor] = []
        for hop in range(hops):
            inputs, outputs = (hop, hop + 1) if adjacent else (0, 1)
            # The scores of all sentences, then of those in memory: cheaper than copies of the memories' vectors.
            scores = (u @ vectors[inputs].mT).gather(2, memories) + (u @ self.temporal_embeddings[inputs].mT).gather(
                2, times
            )
            p = scores * filled if linear else _attend(scores, filled, self.sizes.memories)
            attention.append(p)
            o = _sum_by(p, memories, vectors[outputs]) + _sum_by(p, times, self.temporal_embeddings[outputs])
            u = o + (u if adjacent else u @ self.between_hops)
        answer_words = self.word_embeddings[-1] if adjacent else self.answer_words
        return u @ answer_words.mT, attention

    def _word_counts(self, sentences: Tensor) -> Tensor:
        """(R, 2 U, V): how often a word is in each sentence, then the sum of the word's centered positions in it."""
        counts = self.position.new_zeros(len(sentences), 2, sentences.shape[1], self.sizes.vocab_size)
        counts[:, 0].scatter_add_(2, sentences, torch.ones_like(sentences, dtype=counts.dtype))
        counts[:, 1].scatter_add_(2, sentences, self.position.expand_as(sentences))
        counts[..., 0] = 0  # padding
        return counts.flatten(1, 2)

    def _sentence_vectors(self, counts: Tensor, words: Tensor) -> Tensor:
        """(R, U, d): the sums of the words' embeddings with position encoding: that of the j-th of at most J words is
        weighted in dimension k by 1 + 4 (k - (d + 1) / 2) (j - (J + 1) / 2) / (d J).

        As in the authors' code, except that J there also counts the temporal encoding as a word. The weights of section
        4.1 are half of these, with j and k counted from 1/2.
        """
        bags, by_position = (counts @ words).chunk(2, dim=1)
        return bags + by_position * self.dimension


def _centered(count: int) -> Tensor:
    """2 (i - (count + 1) / 2) / count for i from 1 to `count`; the product of two of them has the paper's 4 / (d J)."""
    return (2 * torch.arange(1, count + 1, dtype=torch.float32) - (count + 1)) / count


def _empty_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


def _attend(scores: Tensor, filled: Tensor, memories: int) -> Tensor:
    """The softmax (R, B, M) of scores over the `filled` ones of `memories` memories and the empty ones, whose vectors
    and scores are 0: a hop can read nothing (as in the authors' code)."""
    empty = (memories - filled.sum(-1, keepdim=True)).clamp_min(0).to(scores.dtype).log()
    return torch.cat([scores.masked_fill(~filled, -torch.inf), empty], -1).softmax(-1)[..., :-1]


def _sum_by(weights: Tensor, indexes: Tensor, vectors: Tensor) -> Tensor:
    """(R, B, d): the sums of the vectors (R, K, d) at `indexes`, int64 (R, B, M), with weights (R, B, M)."""
    by_vector = weights.new_zeros(*weights.shape[:2], vectors.shape[1]).scatter_add(2, indexes, weights)
    return by_vector @ vectors
