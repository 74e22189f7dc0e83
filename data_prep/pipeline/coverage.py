"""Checks, on a sample and before anything is encoded, that the vocabularies of pairs have the sides' scripts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from multihop.common.errors import UserError
from multihop.data_prep.config import TokenizerConfig
from multihop.data_prep.rules.pairs import sides_of
from multihop.data_prep.stages.outputs import read_batches
from multihop.data_prep.tokenizers.tokenizer import load

CHECKED_BYTES = 4_000_000
"""Text to look at: a second of encoding."""
MOST_UNKNOWN = 0.01
"""Maximum share of unknown tokens on a side."""


@dataclass(frozen=True)
class CountUnknown:
    """Count unknown tokens in the pairs of a sample whose id is at most `largest_id`."""

    drawn: str
    """Of `sample.draw_sample`."""
    largest_id: int
    models: tuple[str, str]
    """The tokenizers of source and target."""
    unknown: tuple[int | None, int | None]
    """Their ids of unknown tokens; None: there is none."""


def count_unknown(item: CountUnknown) -> np.ndarray:
    """int64 (2, 2): for source and target the number of unknown tokens, and of tokens."""
    tokenizers = [load(path) for path in dict.fromkeys(item.models)]
    counts = np.zeros((2, 2), np.int64)
    for texts in _texts(item):
        sides = [sides_of(text) for text in texts]
        for side in (0, 1):
            ids, _ = tokenizers[-1 if side else 0].encode([pair[side] for pair in sides])
            unknown = item.unknown[side]
            counts[side] += 0 if unknown is None else int((ids == unknown).sum()), len(ids)
    return counts


def check_coverage(found: Iterable[np.ndarray], tok: TokenizerConfig) -> None:
    """Raise UserError if more than MOST_UNKNOWN of a side's tokens are unknown, by the results of `count_unknown`."""
    counts = sum(found, np.zeros((2, 2), np.int64))
    for side, (unknown, tokens) in zip(("source", "target"), counts.tolist(), strict=True):
        if unknown > MOST_UNKNOWN * tokens:
            whose = "the trained tokenizer" if tok.path is None else f"tokenizer.path={tok.path}"
            instead = "set tokenizer.byte_fallback=true" if tok.path is None else "give one that has its script"
            raise UserError(
                f"{unknown / tokens:.1%} of the {side} side's tokens are unknown to {whose}, at most "
                f"{MOST_UNKNOWN:.0%} can be; {instead}, or correct the texts"
            )


def _texts(item: CountUnknown) -> Iterator[list[str]]:
    for batch in read_batches(item.drawn):
        chosen = batch.column("first").to_numpy() <= np.uint64(item.largest_id)
        texts = batch.column("text").to_pylist()
        yield [texts[row] for row in np.flatnonzero(chosen).tolist()]
