"""Beam search, hypothesis for hypothesis as transformers' `generate` finds them on the same weights.

A step extends the K hypotheses of each sentence by every token and looks at the 2K best extensions. Those of the first
K that end are finished, with their log probability divided by length ** length_penalty, as in fairseq and transformers
(Wu et al. 2016, section 7, equation 14, divide by ((5 + length) / 6) ** length_penalty). The K best that do not end go
on. A sentence is done when it has K finished hypotheses and the best that goes on, divided by its length of now, is
worse than all of them; its rows then leave the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.layers.encoder_decoder import DecoderState
from multihop.pretrain.packed_tokens import PackedTokens, pack_sequences

_BLOCK = 64
_NEVER = -1.0e9
"""The score of a missing hypothesis, as in transformers: scores are compared with it, and added to it."""


@dataclass(frozen=True)
class Search:
    """Settings of the search for a translation."""

    beams: int = 4
    """Hypotheses of a sentence; 1: always the likeliest token."""
    length_penalty: float = 0.6
    """0: the likeliest hypothesis, which is a short one; above 0 longer ones are preferred."""


class Decoder(Protocol):
    """What is searched: an `EncoderDecoder`, or a causal model as a `CausalDecoder`."""

    @property
    def device(self) -> torch.device: ...

    def begin_decoding(self, source: PackedTokens[Tensor], beams: int) -> DecoderState: ...

    def decode_step(self, state: DecoderState, tokens: Tensor) -> Tensor: ...

    def lm_head(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation."""

    tokens: list[int]
    """Token ids, the end token included unless the translation was cut at the limit."""
    score: float
    """The log probability, in nats, divided by length ** length_penalty."""


@torch.inference_mode()
def beam_search(
    model: Decoder,
    sources: Sequence[Sequence[int]],
    limits: Sequence[int],
    special_ids: dict[str, int],
    search: Search,
) -> list[list[Hypothesis]]:
    """Return the `search.beams` best hypotheses of each sentence, the best first.

    Args:
        sources: tokens of each sentence as the model reads it, its end token included.
        limits: the most tokens of each translation, the end token included; at least 1.
    """
    device, beams, start = model.device, search.beams, special_ids.get("pad", special_ids["end"])
    longest = max(limits)
    packed = packed_to_device(pack_sequences(sources), device)
    state = model.begin_decoding(packed, beams)

    active = torch.arange(len(sources), device=device)
    """int64 (S,): the sentences that are not done."""
    limit = torch.tensor(limits, device=device)
    made = torch.full((len(sources), beams, 0), special_ids["end"], device=device)
    scores = torch.full((len(sources), beams), _NEVER, device=device)
    scores[:, 0] = 0.0
    best = _Finished.none(len(sources), beams, longest, special_ids["end"], device)
    tokens = torch.full((len(sources) * beams,), start, device=device)
    done: dict[int, list[Hypothesis]] = {}
    for length in range(1, longest + 1):
        logits = model.lm_head(model.decode_step(state, tokens)).float()
        log_probabilities = torch.log_softmax(logits, -1, out=logits)
        if "pad" in special_ids:
            log_probabilities[:, special_ids["pad"]] = -torch.inf  # never part of a translation
        most = min(2 * beams, log_probabilities.shape[1])  # more cannot be needed
        likeliest, token = largest(log_probabilities, most)
        extended = likeliest.view(len(active), beams, -1) + scores[..., None]
        scores_of, chosen = extended.flatten(1).topk(2 * beams)
        parent, token = chosen // extended.shape[2], token.view(len(active), -1).gather(1, chosen)
        extended_made = torch.cat([_rows(made, parent), token[..., None]], -1)

        ends = (token == special_ids["end"]) | (length == limit[:, None])
        best.add(extended_made, scores_of / length**search.length_penalty, ends & _first(ends, beams))

        scores, going = (scores_of + ends * _NEVER).topk(beams)
        made, parent, token = _rows(extended_made, going), parent.gather(1, going), token.gather(1, going)
        over = best.are_all_better_than(scores[:, 0] / length**search.length_penalty) | (length == limit)
        if beams == 1:
            over |= best.exists[:, 0]
        for row in over.nonzero().flatten().tolist():
            done[int(active[row])] = best.hypotheses(row)
        if over.all():
            break
        state.reorder((torch.arange(len(active), device=device)[:, None] * beams + parent).flatten())
        if over.any():
            left = _filled_up(~over)
            active, limit, made, scores, token = active[left], limit[left], made[left], scores[left], token[left]
            best.select_sentences(left)
            state.select_sentences(left)
        tokens = token.flatten()
    return [done[number] for number in range(len(sources))]


@dataclass
class _Finished:
    """The best finished hypotheses of each sentence, the best first."""

    tokens: Tensor
    """int64 (S, K, longest), with end tokens behind each."""
    lengths: Tensor
    """int64 (S, K)."""
    scores: Tensor
    """float32 (S, K)."""
    exists: Tensor
    """bool (S, K)."""

    @classmethod
    def none(cls, sentences: int, beams: int, longest: int, end: int, device: torch.device) -> "_Finished":
        shape = (sentences, beams)
        return cls(
            torch.full((*shape, longest), end, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.full(shape, _NEVER, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
        )

    def add(self, made: Tensor, scores: Tensor, finished: Tensor) -> None:
        """Add the extensions, (S, 2K, length), that are finished, bool (S, 2K)."""
        if not finished.any():
            return
        length, beams = made.shape[-1], self.scores.shape[1]
        new = self.tokens[:, :1].repeat(1, made.shape[1], 1)
        new[..., :length] = made
        new[..., length:] = made.new_zeros(())
        merged = torch.cat([self.scores, scores + ~finished * _NEVER], 1)
        self.scores, which = merged.topk(beams)
        self.tokens = _rows(torch.cat([self.tokens, new], 1), which)
        self.lengths = torch.cat([self.lengths, torch.full_like(finished, length, dtype=torch.int64)], 1).gather(
            1, which
        )
        self.exists = torch.cat([self.exists, finished], 1).gather(1, which)

    def are_all_better_than(self, scores: Tensor) -> Tensor:
        """Return bool (S,): whether a sentence has all K, and none of them is worse than its score in `scores` (S,)."""
        return self.exists.all(1) & (scores <= self.scores.min(1).values)

    def select_sentences(self, sentences: Tensor) -> None:
        self.tokens, self.lengths = self.tokens[sentences], self.lengths[sentences]
        self.scores, self.exists = self.scores[sentences], self.exists[sentences]

    def hypotheses(self, sentence: int) -> list[Hypothesis]:
        rows = zip(
            self.tokens[sentence].tolist(), self.lengths[sentence].tolist(), self.scores[sentence].tolist(), strict=True
        )
        return [Hypothesis(tokens[:length], score) for tokens, length, score in rows if length]


def _rows(hypotheses: Tensor, which: Tensor) -> Tensor:
    """Select the hypotheses of each sentence that `which` names: (S, K, T), int64 (S, M) -> (S, M, T)."""
    return hypotheses.gather(1, which[..., None].expand(-1, -1, hypotheses.shape[-1]))


def _first(extensions: Tensor, count: int) -> Tensor:
    """Return bool (M,): the first `count` of the extensions (S, M)."""
    return torch.arange(extensions.shape[1], device=extensions.device) < count


def _filled_up(stays: Tensor) -> Tensor:
    """Return int64 (S',): the rows at which `stays`, bool (S,), is true; the last ones at the indexes of those that go,
    so that the others need not be moved."""
    left = stays.nonzero().flatten()
    rows = torch.arange(len(left), device=stays.device)
    rows[~stays[: len(left)]] = left[left >= len(left)]
    return rows


def largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `values.topk(count)`, (R, V) -> (R, count): the largest values and their columns, int64 (R, count).

    Only the `count` blocks of columns with the largest maxima can hold one of them, and maxima are found at the speed
    of memory.
    """
    blocks = values.shape[1] // _BLOCK
    if blocks <= count:
        maxima, columns = values.topk(count)
        return maxima, columns
    whole = blocks * _BLOCK
    maxima = values[:, :whole].unflatten(1, (blocks, _BLOCK)).amax(-1)
    starts = maxima.topk(count, sorted=False).indices * _BLOCK
    inside = (starts[..., None] + torch.arange(_BLOCK, device=values.device)).flatten(1)
    rest = torch.arange(whole, values.shape[1], device=values.device).expand(len(values), -1)
    columns = torch.cat([inside, rest], 1)
    maxima, which = values.gather(1, columns).topk(count)
    return maxima, columns.gather(1, which)
