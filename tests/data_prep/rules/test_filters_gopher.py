"""Gopher's rules, compared with a literal implementation of the paper that ignores speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.data_prep.config import GopherQuality, GopherRepetition
from multihop.data_prep.rules import gopher, repetition
from multihop.data_prep.rules import rule as rules
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.repetition import RepeatedNgrams
from multihop.data_prep.rules.rule import Document

STOP_WORDS = GopherQuality().stop_words
TOKENS = ["the", "The,", "to", "a", "bb", "ccc.", "of", "extraordinarily", "12", "#", "...", "wait…", "été"]
TOKENS += ["•", "-", "*", "***"]
few_words = st.lists(st.sampled_from("abc"), max_size=40)
more_words = st.lists(st.text("ab", min_size=1, max_size=4), max_size=60)
documents = st.lists(
    st.tuples(st.sampled_from(TOKENS), st.sampled_from([" "] * 6 + ["\n", "\n\n"])), min_size=1, max_size=120
).map(lambda parts: clean("".join(word + blank for word, blank in parts)))


def plain_top_share(words: list[str], n: int) -> float:
    """Return the share of the characters "contained within the most frequently-occurring n-gram"."""
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    most = max((ngrams.count(ngram) for ngram in ngrams), default=0)
    if most < 2:
        return 0.0
    longest = max(sum(map(len, ngram)) for ngram in ngrams if ngrams.count(ngram) == most)
    return most * longest / sum(map(len, words))


def plain_duplicate_share(words: list[str], n: int) -> float:
    """Return the share of characters "within all duplicate n-grams", "in overlapping n-grams" not "more than once"."""
    ngrams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    inside = {i + k for i, ngram in enumerate(ngrams) if ngram in ngrams[:i] for k in range(n)}
    return sum(len(words[i]) for i in inside) / max(sum(map(len, words)), 1)


def plain_duplicates(parts: list[str]) -> tuple[float, float]:
    """Return the share of parts, and of characters in parts, that occurred before."""
    again = [part for i, part in enumerate(parts) if part in parts[:i]]
    return len(again) / len(parts), sum(map(len, again)) / sum(map(len, parts))


def plain_quality(text: str) -> dict[str, float]:
    words = text.split()
    lines = [line for line in text.split("\n") if line]
    bare = ["".join(char if char.isalnum() or char == "_" else " " for char in word).split() for word in words]
    return {
        "words": len(words),
        "mean word length": sum(map(len, words)) / len(words),
        "hashes": text.count("#") / len(words),
        "ellipses": (text.count("...") + text.count("…")) / len(words),
        "bullet lines": sum(line[0] in "•‣◦▪●■" or line[:2] in ("- ", "* ") for line in lines) / len(lines),
        "ellipsis lines": sum(line.endswith("...") or line.endswith("…") for line in lines) / len(lines),
        "alphabetic": sum(any(char.isalpha() for char in word) for word in words) / len(words),
        "stop words": len({part.lower() for parts in bare for part in parts} & set(STOP_WORDS)),
    }


@pytest.mark.parametrize("sort_from", [0, repetition.SORT_FROM])
@given(words=few_words | more_words, n=st.integers(2, 10))
def test_shares_of_repeated_runs_are_those_of_the_papers_words(sort_from, words, n):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repetition, "SORT_FROM", sort_from)
        repeated = RepeatedNgrams(words)
    assert repeated.top_share(n) == plain_top_share(words, n)
    assert repeated.duplicate_share(n) == plain_duplicate_share(words, n)


@given(few_words | more_words, st.lists(st.tuples(st.integers(2, 10), st.floats(0, 1)), max_size=9))
def test_what_is_known_of_short_runs_never_decides_wrongly_about_long_ones(words, questions):
    repeated = RepeatedNgrams(words)
    for n, limit in questions:
        assert repeated.duplicate_share_exceeds(n, limit) == (plain_duplicate_share(words, n) > limit)


@given(documents, st.sampled_from([0.2, 0.5, 1.0]))
def test_repetition_rules_drop_what_the_paper_drops(text, scale):
    limits = {name: share * scale for name, share in GopherRepetition().model_dump().items()}
    to_ask = gopher.repetition_rules(GopherRepetition(**limits))
    words = text.split()
    lines = plain_duplicates([line for line in text.split("\n") if line])
    paragraphs = plain_duplicates(text.split("\n\n"))
    shares = [lines[0], paragraphs[0], lines[1], paragraphs[1]]
    shares += [plain_top_share(words, n) for n in (2, 3, 4)]
    shares += [plain_duplicate_share(words, n) for n in range(5, 11)]
    document = Document(text)
    assert [drops(document) for _, drops in to_ask] == [
        share > limit for share, limit in zip(shares, limits.values(), strict=True)
    ]


@given(documents, st.integers(1, 60), st.integers(1, 3))
def test_quality_rules_drop_what_the_paper_drops(text, min_words, min_stop_words):
    to_ask = gopher.quality_rules(GopherQuality(min_words=min_words, max_words=80, min_stop_words=min_stop_words))
    plain = plain_quality(text)
    document = Document(text)
    assert [drops(document) for _, drops in to_ask] == [
        plain["words"] < min_words,
        plain["words"] > 80,
        plain["mean word length"] < 3,
        plain["mean word length"] > 10,
        plain["hashes"] > 0.1,
        plain["ellipses"] > 0.1,
        plain["bullet lines"] > 0.9,
        plain["ellipsis lines"] > 0.3,
        plain["alphabetic"] < 0.8,
        plain["stop words"] < min_stop_words,
    ]


def test_the_thresholds_are_those_of_the_paper():
    assert GopherQuality().model_dump() == {
        "min_words": 50,
        "max_words": 100_000,
        "min_mean_word_length": 3,
        "max_mean_word_length": 10,
        "max_hashes": 0.1,
        "max_ellipses": 0.1,
        "max_bullet_lines": 0.9,
        "max_ellipsis_lines": 0.3,
        "min_alphabetic_words": 0.8,
        "min_stop_words": 2,
        "stop_words": ["the", "be", "to", "of", "and", "that", "have", "with"],
    }
    assert list(GopherRepetition().model_dump().values()) == [
        *(0.30, 0.30, 0.20, 0.20),
        *(0.20, 0.18, 0.16),
        *(0.15, 0.14, 0.13, 0.12, 0.11, 0.10),
    ]


def test_a_threshold_of_null_switches_its_rule_off():
    off = dict.fromkeys(GopherRepetition.model_fields)
    assert gopher.repetition_rules(GopherRepetition(**off)) == []
    (only,) = gopher.repetition_rules(GopherRepetition(**off | {"max_duplicate_7gram": 0.25}))
    assert only[0] == "more than 0.25 of the characters in 7 words that occurred before"
    off = {name: None for name in GopherQuality.model_fields if name != "stop_words"}
    assert gopher.quality_rules(GopherQuality(**off)) == []


@pytest.mark.parametrize("text", ["", "word", "a a", "\n"])
def test_tiny_texts_are_asked_every_question(text):
    document = Document(text)
    for _, drops in gopher.quality_rules(GopherQuality()) + gopher.repetition_rules(GopherRepetition()):
        assert drops(document) in (True, False)


def test_of_a_very_long_text_the_beginning_is_looked_at_but_all_words_are_counted(monkeypatch):
    monkeypatch.setattr(rules, "MAX_ITEMS", 20)
    document = Document("\n".join(["a b c d"] * 10))
    assert (len(document.words), document.word_count, document.characters) == (20, 40, 20)
    assert (len(document.lines), len(document.paragraphs)) == (10, 1)
    assert Document("a\n" * 30).lines == ["a"] * 20


def test_reasons_differ():
    reasons = [rule[0] for rule in gopher.quality_rules(GopherQuality()) + gopher.repetition_rules(GopherRepetition())]
    assert len(set(reasons)) == len(reasons) == 23


def test_stop_words_are_found_in_any_unicode_form() -> None:
    composed, decomposed = "\u00eatre \u00e0", "e\u0302tre a\u0300"
    for spelled in (composed, decomposed):
        rules_of = gopher.quality_rules(GopherQuality(min_words=None, stop_words=spelled.split(), min_stop_words=2))
        for text in (composed, decomposed):
            document = Document(clean(f"Peut-{text} midi."))
            assert [reason for reason, drops in rules_of if drops(document)] == []
