"""Sides of pairs are cleaned separately, and each rule drops what it describes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.data_prep.config import FilterConfig, PairFilters
from multihop.data_prep.rules.filters import dependencies
from multihop.data_prep.rules.pairs import clean_side, join_sides, make_pair_filter, split_sides

BLANKS = st.sampled_from([" ", "\t", "\n", "\r\n", "\u00a0", "\u2028", "\x85", "\x1c", "\u3000", "\x00", "\ufeff"])


@given(st.lists(BLANKS | st.characters(exclude_categories=["Cs"]), max_size=12), st.text(max_size=12))
def test_a_cleaned_side_is_one_line_without_tabs_and_both_are_found_again(first: list[str], second: str) -> None:
    source, target = clean_side("".join(first)), clean_side(second)
    for side in (source, target):
        assert side == clean_side(side) and side.split() == ([] if not side else side.split(" "))
    assert split_sides(join_sides(source, target)) == (source, target)


def reason(source: str, target: str, **settings: Any) -> str | None:
    return make_pair_filter(PairFilters.model_validate(settings))(source, target)


@pytest.mark.parametrize(
    ("source", "target", "settings", "expected"),
    [
        ("one", "uno", {}, None),
        ("OK", "OK", {}, "equal sides"),
        ("OK", "OK", {"drop_equal": False}, None),
        ("a " * 79 + "a", "b " * 79 + "b", {}, None),
        ("a " * 80 + "a", "b " * 79 + "b", {}, "a side of more than 80 words"),
        ("a " * 80 + "a", "b " * 79 + "b", {"max_words": None}, None),
        ("a b", "c d e", {"min_words": 3}, "a side of fewer than 3 words"),
        ("a b", "c d e", {"min_words": None}, None),
        ("a", "b " * 8 + "b", {}, None),
        ("a", "b " * 9 + "b", {}, "a side more than 9 times as long as the other"),
        ("a b", "c d e f", {"max_ratio": 1.5}, "a side more than 1.5 times as long as the other"),
        ("a", "b " * 9 + "b", {"max_ratio": None}, None),
        ("a" * 1001, "b", {}, "a word of more than 1000 characters"),
        ("a" * 1001, "b", {"max_word_length": None}, None),
    ],
)
def test_each_rule_has_its_reason(source: str, target: str, settings: dict[str, Any], expected: str | None) -> None:
    assert reason(source, target, **settings) == expected
    assert reason(target, source, **settings) == expected


def test_a_side_in_another_language_is_dropped_and_a_doubtful_one_is_kept() -> None:
    pytest.importorskip("py3langid")
    languages = {"source": "en", "target": "es"}
    english, spanish = "The quick brown fox jumped over the lazy dog.", "Ayer fuimos a la playa con nuestros amigos."
    assert reason(english, spanish, languages=languages) is None
    assert reason(spanish, english, languages=languages) == "source not in en"
    assert reason(english, english + " Yes.", languages=languages) == "target not in es"
    assert reason("Format", "Formato", languages=languages) is None, "one word tells no language"
    config = FilterConfig.model_validate({"pairs": {"languages": languages}})
    assert dependencies(config)["languages"].startswith("py3langid")
    with pytest.raises(UserError, match=r"languages\.target=spanish, expected a code from a"):
        make_pair_filter(PairFilters.model_validate({"languages": {"source": "en", "target": "spanish"}}))
