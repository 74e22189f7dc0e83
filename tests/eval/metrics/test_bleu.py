"""BLEU from sums over sentences equals sacrebleu's own, also for a whole test set."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.metrics.bleu import scores, statistics
from multihop.eval.metrics.score import from_sums

WORDS = ("the", "a", "cat", "dog,", "sat", "on", "mat.", "«ja»", "3.5")
SENTENCE = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)
REFERENCE = st.lists(st.sampled_from(WORDS), min_size=1, max_size=9).map(" ".join)


@given(pairs=st.lists(st.tuples(SENTENCE, REFERENCE), min_size=1, max_size=12))
def test_sums_of_sentences_give_the_bleu_of_the_corpus(pairs: list[tuple[str, str]]) -> None:
    translations, references = map(list, zip(*pairs, strict=True))
    table = statistics(translations, references)
    expected = sacrebleu.corpus_bleu(translations, [references]).score
    assert table.shape == (len(pairs), 10)
    assert float(from_sums("BLEU", table.sum(0))) == pytest.approx(expected, abs=1e-9)
    assert from_sums("BLEU", np.stack([table.sum(0)] * 3)) == pytest.approx([expected] * 3, abs=1e-9)
    assert scores(translations, references)[0] == pytest.approx(expected)


def test_by_hand() -> None:
    # Tokens 5 of 6; matches 4/5, 3/4, 2/3, 1/2: a mean of 0.2^(1/4); brevity exp(1 - 6/5).
    value, others, signatures = scores(["a b c d x"], ["a b c d e f"])
    assert value == pytest.approx(100 * 0.2**0.25 * np.exp(-0.2))
    assert others["length ratio"] == pytest.approx(5 / 6) and 0 < others["chrF"] < 100
    assert "tok:13a" in signatures["BLEU"] and "nc:6" in signatures["chrF"]


def test_the_same_text_scores_100_and_nothing_scores_0() -> None:
    text = ["the cat sat on the mat ."] * 3
    assert scores(text, text)[0] == pytest.approx(100)
    assert scores([""] * 3, text)[0] == 0 and float(from_sums("BLEU", statistics([""] * 3, text).sum(0))) == 0
