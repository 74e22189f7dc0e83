"""Texts translated by beam search: batches of similar length, results in the order of the input."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from multihop.common.errors import UserError
from multihop.data_prep.rules.pairs import clean_side
from multihop.eval.inference.beam_search import Search, beam_search
from multihop.eval.inference.trained_model import TrainedModel
from multihop.pretrain.models.layers.encoder_decoder import EncoderDecoder

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
        UserError: the model does not translate.
    """
    search = search or Search()
    model = translator(trained)
    limit, end = model.config.max_positions, trained.special_ids["end"]
    encoded = [trained.tokenizer.encode([clean_side(text)])[0].tolist() for text in texts]
    sources = [[*ids[: limit - 1], end] for ids in encoded]
    done: dict[int, Translation] = {
        number: Translation("", 0.0, False) for number, ids in enumerate(encoded) if not ids
    }
    for batch in _batches(sources, [i for i in range(len(texts)) if i not in done], batch_tokens // search.beams):
        limits = [min(len(sources[number]) + MORE_TOKENS, limit) for number in batch]
        with trained.packed_weights:
            hypotheses = beam_search(model, [sources[number] for number in batch], limits, trained.special_ids, search)
        for number, (best, *_) in zip(batch, hypotheses, strict=True):
            tokens = [token for token in best.tokens if token != end]
            text = trained.output_tokenizer.decode(tokens)
            done[number] = Translation(text, best.score, len(encoded[number]) >= limit, sources[number], best.tokens)
    return [done[number] for number in range(len(texts))]


def translator(trained: TrainedModel) -> EncoderDecoder:
    """Return the model as an encoder-decoder.

    Raises:
        UserError: it does not translate.
    """
    if not trained.family.translates:
        raise UserError(
            f"{trained.path} is a {trained.family.display_name}, which does not translate; use `multihop "
            f"{trained.command}`"
        )
    trained.needs(trained.model.lm_head, "predicting tokens")
    return cast(EncoderDecoder, trained.model)


def _batches(sources: Sequence[Sequence[int]], numbers: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the numbers of sources, the longest first: as many as have `most` tokens if all were as long as the
    first."""
    left = sorted(numbers, key=lambda number: -len(sources[number]))
    while left:
        size = max(1, most // len(sources[left[0]]))
        yield left[:size]
        left = left[size:]
