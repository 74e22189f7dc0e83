"""Exact match and F1 against values worked out by hand, and the corner cases of the two official scripts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.eval.metrics.squad import accepted_texts, normalize, score_texts
from multihop.eval.tasks.squad import Name
from multihop.eval.tasks.task import Example


def _example(*answers: str) -> Example:
    """Return an example whose context consists of its answers."""
    targets: list[float] = []
    context = ""
    for answer in answers:
        targets += [len(context), len(context) + len(answer)]
        context += answer + " | "
    return Example(("?", context), tuple(targets))


def _one(name: Name, text: str, *answers: str) -> tuple[float, float]:
    scores = score_texts(name, [_example(*answers)], [text])
    return float(scores.exact_match[0]), float(scores.f1[0])


def test_normalization() -> None:
    assert normalize("  The U.S.\tNavy's a-team ") == "us navys ateam"
    # Punctuation goes before articles: an article stays where a mark joined it to a word, and ASCII marks alone go.
    assert normalize("A/the cat \u2013 an “anthem”") == "athe cat \u2013 “anthem”"
    assert normalize("Theatre of the AN") == "theatre of"
    assert normalize("a-") == normalize("The.") == ""


@pytest.mark.parametrize("name", ["squad1", "squad2"])
def test_the_best_accepted_answer_counts(name: Name) -> None:
    assert accepted_texts(_example("silver bridge", "bridge")) == ["silver bridge", "bridge"]
    assert _one(name, "The Bridge!", "silver bridge", "bridge") == (1.0, 1.0)
    # 2 of 3 words given, 2 of 2 wanted.
    assert _one(name, "old silver bridge", "silver bridge") == (0.0, pytest.approx(2 * (2 / 3) / (2 / 3 + 1)))
    # A word counts as often as both have it: 1 of 3 and 1 of 2.
    assert _one(name, "bridge bridge bridge", "silver bridge") == (0.0, pytest.approx(0.4))
    assert _one(name, "river", "silver bridge") == (0.0, 0.0)
    assert _one(name, "", "silver bridge") == (0.0, 0.0)


def test_no_answer_is_right_only_for_an_impossible_question() -> None:
    assert _one("squad2", "") == (1.0, 1.0)
    assert _one("squad2", "bridge") == (0.0, 0.0)
    # Nothing is left of it, which the official script takes for no answer.
    assert _one("squad2", "the") == (1.0, 1.0)


def test_the_versions_differ_on_answers_of_which_nothing_is_left() -> None:
    # evaluate-v1.1.py compares bags without words in common; evaluate-v2.0.py drops such an answer.
    assert _one("squad1", "The", "the") == (1.0, 0.0)
    assert _one("squad2", "The", "the") == (1.0, 1.0)
    assert _one("squad1", "A", "the", "bridge") == (1.0, 0.0)
    assert _one("squad2", "A", "the", "bridge") == (0.0, 0.0)


def test_means_of_all_and_of_the_questions_with_and_without_an_answer() -> None:
    examples = [_example("silver bridge"), _example("river"), _example(), _example()]
    scores = score_texts("squad2", examples, ["bridge", "river", "", "stone"])
    assert scores.has_answer.tolist() == [True, True, False, False]
    assert scores.means() == {
        "SQuAD F1": pytest.approx((2 / 3 + 1 + 1 + 0) / 4),
        "exact match": 0.5,
        "HasAns SQuAD F1": pytest.approx((2 / 3 + 1) / 2),
        "HasAns exact match": 0.5,
        "NoAns SQuAD F1": 0.5,
        "NoAns exact match": 0.5,
    }
    assert {*score_texts("squad1", examples[:2], ["a", "b"]).means()} == {"SQuAD F1", "exact match"}


@given(st.lists(st.sampled_from(["the", "A", "river", "stone", "U.S.", "\u2013"]), max_size=6), st.randoms())
def test_f1_knows_no_order_and_exact_match_implies_f1(words: list[str], rng) -> None:  # type: ignore[no-untyped-def]
    shuffled = words[:]
    rng.shuffle(shuffled)
    scores = score_texts("squad2", [_example(" ".join(words))] * 2, [" ".join(words), " ".join(shuffled)])
    assert scores.exact_match[0] == 1.0
    assert np.allclose(scores.f1, 1.0)
