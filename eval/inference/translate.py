"""Texts translated, or completed by a causal model: batches of similar length, results in the order of the input."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from multihop.common.errors import UserError
from multihop.data_prep.rules.pairs import clean_side
from multihop.eval.inference.beam_search import Hypothesis, Search, beam_search
from multihop.eval.inference.causal_decoder import CausalDecoder
from multihop.eval.inference.ctc_search import ctc_search
from multihop.eval.inference.trained_model import TrainedModel
from multihop.pretrain.models.layers.ctc import CtcTranslator
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder
from multihop.pretrain.objectives.completion import prompt_tokens

MORE_TOKENS = 50
"""The most tokens by which a translation may be longer than its source (Vaswani et al. 2017, section 6.1)."""
BATCH_TOKENS = 4096
"""Source tokens of a batch, times beams."""


@dataclass(frozen=True)
class Translation:
    """The translation of one text."""

    text: str
    score: float
    """The score of the hypothesis (`beam_search.Hypothesis`); 0 for an empty text."""
    is_truncated: bool
    """Whether the source had more tokens than the model has positions, and was cut."""
    source: list[int] = field(default_factory=list)
    """Tokens that were read, the end token included; none of an empty text."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the translation, with its end token unless it was cut at the limit."""


def translate(
    trained: TrainedModel, texts: Sequence[str], search: Search | None = None, batch_tokens: int = BATCH_TOKENS
) -> list[Translation]:
    """Return the best translation of each text, a sentence or a paragraph as in the training data; of a blank one
    nothing.

    Raises:
        UserError: the model neither translates nor completes.
    """
    search = search or Search()
    check_translates(trained)
    limit, end = trained.model.config.max_positions, trained.special_ids["end"]
    encoded = [trained.tokenizer.encode([clean_side(text)])[0].tolist() for text in texts]
    kept = limit - (2 if trained.completes else 1)
    # A source that is completed is cut at its beginning, as where its target is scored: its end may be a relation.
    sources = [prompt_tokens(ids[-kept:], end) if trained.completes else [*ids[:kept], end] for ids in encoded]
    done: dict[int, Translation] = {
        number: Translation("", 0.0, False) for number, ids in enumerate(encoded) if not ids
    }
    for batch in _batches(sources, [i for i in range(len(texts)) if i not in done], batch_tokens // search.beams):
        with trained.packed_weights:
            hypotheses = _search(trained, [sources[number] for number in batch], search)
        for number, (best, *_) in zip(batch, hypotheses, strict=True):
            tokens = [token for token in best.tokens if token != end]
            text = trained.output_tokenizer.decode(tokens)
            done[number] = Translation(text, best.score, len(encoded[number]) > kept, sources[number], best.tokens)
    return [done[number] for number in range(len(texts))]


def _search(trained: TrainedModel, sources: Sequence[Sequence[int]], search: Search) -> list[list[Hypothesis]]:
    """Return the hypotheses of sources, the best first, by the search of the model's family."""
    if trained.family.uses_ctc:
        return ctc_search(cast(CtcTranslator, trained.model), sources, trained.special_ids["pad"], search.beams)
    limit = trained.model.config.max_positions
    if not trained.completes:
        limits = [min(len(source) + MORE_TOKENS, limit) for source in sources]
        return beam_search(cast(EncoderDecoder, trained.model), sources, limits, trained.special_ids, search)
    # The last token that is made is not read.
    limits = [min(len(source) + MORE_TOKENS, limit - len(source) + 1) for source in sources]
    decoder = CausalDecoder(trained.model, trained.tokenizer.vocab_size)
    return beam_search(decoder, sources, limits, trained.special_ids, search)


def check_translates(trained: TrainedModel) -> None:
    """Refuse a model that neither translates nor completes.

    Raises:
        UserError: it does not.
    """
    if not (trained.family.translates or trained.completes):
        raise UserError(
            f"{trained.path} is a {trained.family.display_name}, which does not translate; use `multihop "
            f"{trained.command}`"
        )
    trained.needs(trained.model.lm_head, "predicting tokens")


def _batches(sources: Sequence[Sequence[int]], numbers: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the numbers of sources, the longest first: as many as have `most` tokens if all were as long as the
    first."""
    left = sorted(numbers, key=lambda number: -len(sources[number]))
    while left:
        size = max(1, most // len(sources[left[0]]))
        yield left[:size]
        left = left[size:]
