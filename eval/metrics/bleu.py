"""BLEU (Papineni et al. 2002) as sacrebleu computes it (Post 2018), and the sums over sentences that determine it."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError

_ORDERS = 4
_LAST_WORDS = (10, 20, 30, 40)
CLASSES = ("1-10", "11-20", "21-30", "31-40", "41+")
"""Words of the source, which spaces separate."""


def check_installed() -> None:
    """Raise UserError if sacrebleu is not installed. It is not imported, so this is cheap before a training."""
    if find_spec("sacrebleu") is None:
        raise UserError("BLEU needs sacrebleu, which is not installed; pip install 'multihop[translation]'")


def statistics(translations: Sequence[str], references: Sequence[str]) -> NDArray[np.float64]:
    """Return float64 (N, 10): tokens of translation and reference, matching n-grams of 1 to 4 tokens, and all of
    these."""
    metric = _bleu(effective_order=True)  # has no effect on the counts; sacrebleu warns without it
    counts = [
        metric.sentence_score(translation, [reference])
        for translation, reference in zip(translations, references, strict=True)
    ]
    return np.array([[each.sys_len, each.ref_len, *each.counts, *each.totals] for each in counts], np.float64)


def bleu_of_sums(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return corpus BLEU, 0 to 100, of many (re)samples of sentences from sums of their `statistics`, (..., 10) ->
    (...).

    With sacrebleu's exponential smoothing: the i-th order without a match counts as 1 / 2^i matches.
    """
    lengths, counts, totals = sums[..., :2], sums[..., 2 : 2 + _ORDERS], sums[..., 2 + _ORDERS :]
    lacking = np.cumsum((counts == 0) & (totals > 0), axis=-1)
    smoothed = np.where(counts == 0, 0.5**lacking, counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        precisions = np.where(totals > 0, smoothed / totals, 0.0)
        mean = np.exp(np.log(precisions).mean(-1))
        brevity = np.where(lengths[..., 0] < lengths[..., 1], np.exp(1 - lengths[..., 1] / lengths[..., 0]), 1.0)
    has_matches = counts.any(-1) & (lengths[..., 0] > 0)
    return np.where(has_matches, 100 * brevity * np.nan_to_num(mean), 0.0)


def scores(translations: Sequence[str], references: Sequence[str]) -> tuple[float, dict[str, float], dict[str, str]]:
    """Return BLEU; chrF and the ratio of lengths; and sacrebleu's signatures of both metrics, which list their
    settings.

    Raises:
        UserError: sacrebleu is not installed.
    """
    bleu, chrf = _bleu(), _chrf()
    result = bleu.corpus_score(list(translations), [list(references)])
    others = {
        "chrF": float(chrf.corpus_score(list(translations), [list(references)]).score),
        "length ratio": float(result.ratio),
    }
    return float(result.score), others, {"BLEU": str(bleu.get_signature()), "chrF": str(chrf.get_signature())}


def mean_bleu_2(translations: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return the mean over sentences of BLEU of unigrams and bigrams, 0 to 100; of sentences of one word, of unigrams.

    A translation is compared with all references of its source (Bosselut et al. 2019, section 4.1).

    Raises:
        UserError: sacrebleu is not installed.
    """
    metric = _bleu(max_ngram_order=2, effective_order=True)
    scores_of = [
        metric.sentence_score(translation, list(each)).score
        for translation, each in zip(translations, references, strict=True)
    ]
    return float(np.mean(scores_of))


def sentences_by_length(source_words: Sequence[int]) -> list[int]:
    """Return the number of sentences in each of `CLASSES`."""
    return np.bincount(_classes(source_words), minlength=len(CLASSES)).tolist()


def bleu_by_length(predictions: dict[str, Any]) -> list[float]:
    """Return corpus BLEU, 0 to 100, of the sentences of each of `CLASSES`; NaN for a class without sentences.

    Args:
        predictions: predictions of a trial, as `evaluate_translation` returns them.
    """
    table = np.array(predictions["statistics"], np.float64)
    classes = _classes(predictions["source_words"])
    members = [classes == number for number in range(len(CLASSES))]
    return [float(bleu_of_sums(table[rows].sum(0))) if rows.any() else float("nan") for rows in members]


def _classes(source_words: Sequence[int]) -> NDArray[np.int64]:
    return np.searchsorted(_LAST_WORDS, source_words)


def _bleu(**options: Any) -> Any:
    check_installed()
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(**options)


def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()
