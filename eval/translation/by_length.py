"""BLEU by the length of the source: what a model that passes the source on in one vector loses on long sentences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.eval.translation.bleu import bleu_of_sums

_LAST_WORDS = (10, 20, 30, 40)
CLASSES = ("1-10", "11-20", "21-30", "31-40", "41+")
"""Words of the source, which spaces separate."""


def sentences_by_length(source_words: Sequence[int]) -> list[int]:
    """How many sentences each of `CLASSES` has."""
    return np.bincount(_classes(source_words), minlength=len(CLASSES)).tolist()


def bleu_by_length(predictions: dict[str, Any]) -> list[float]:
    """Corpus BLEU, 0 to 100, of the sentences of each of `CLASSES`; NaN for a class without sentences.

    Args:
        predictions: of a trial, as `evaluate_translation` returns them.
    """
    table = np.array(predictions["statistics"], np.float64)
    classes = _classes(predictions["source_words"])
    there = [classes == number for number in range(len(CLASSES))]
    return [float(bleu_of_sums(table[rows].sum(0))) if rows.any() else float("nan") for rows in there]


def _classes(source_words: Sequence[int]) -> NDArray[np.int64]:
    return np.searchsorted(_LAST_WORDS, source_words)
