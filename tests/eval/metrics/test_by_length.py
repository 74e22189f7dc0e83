"""BLEU by length equals sacrebleu's for the sentences of each class; the floor of frequent words is as documented."""

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.metrics.bleu import CLASSES, bleu_by_length, sentences_by_length, statistics
from multihop.eval.zero_shot.translation import frequent_words

WORDS = st.sampled_from(("a", "cat", "dog", "sat", "on", "mat."))
SENTENCES = st.tuples(st.integers(1, 60), *[st.lists(WORDS, min_size=1, max_size=9).map(" ".join)] * 2)


def class_of(words: int) -> str:
    ends = ((10, "1-10"), (20, "11-20"), (30, "21-30"), (40, "31-40"))
    return next((name for last, name in ends if words <= last), "41+")


@given(given=st.lists(SENTENCES, min_size=1, max_size=20))
def test_each_class_has_the_bleu_of_its_sentences(given: list[tuple[int, str, str]]) -> None:
    words, translations, references = map(list, zip(*given, strict=True))
    counts = sentences_by_length(words)
    result = bleu_by_length({"source_words": words, "statistics": statistics(translations, references).tolist()})
    for name, count, bleu in zip(CLASSES, counts, result, strict=True):
        ours = [pair for length, *pair in given if class_of(length) == name]
        assert count == len(ours)
        if ours:
            expected = sacrebleu.corpus_bleu([one for one, _ in ours], [[other for _, other in ours]]).score
            assert bleu == pytest.approx(expected, abs=1e-9)
        else:
            assert bleu != bleu, "no sentences, no score"


def test_frequent_words_are_those_of_the_references_as_many_as_they_have() -> None:
    assert frequent_words(["y la casa", "la casa", "la mar y la tierra"]) == "la y casa"
    assert frequent_words(["uno"]) == "uno"
