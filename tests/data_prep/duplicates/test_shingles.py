"""Words and n-grams, compared with a reference that reads character by character."""

import unicodedata
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multihop.data_prep.duplicates import shingles
from multihop.data_prep.duplicates.shingles import MAX_WORD_BYTES, ngrams, read_words

NO_BLANKS = ["THAI", "LAO", "MYANMAR", "KHMER", "CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "HIRAGANA", "KATAKANA"]
NO_BLANKS += ["IDEOGRAPHIC " + rest for rest in ("ITERATION MARK", "CLOSING MARK", "NUMBER ZERO")]
NO_BLANKS += ["HENTAIGANA", "VERTICAL IDEOGRAPHIC ITERATION MARK"]
ALPHABET = (
    "ab Z9_.\n-\u00e9\u00c9\u00df\u1e9e\u0130\u023a\u212a\u03a3\u03c2\u0416\u0436\u0301\u0e44\u0e25\u0e49"
    "\u4e2d\u3042\u30fc\uac00\u201c\u2014\u00a0\U0001f600\U00020000\U00010400\u0660"
)
CHARACTERS = st.characters(codec="utf-8", max_codepoint=0x2FFFF, exclude_categories=["Cn", "Cs"])
TEXTS = st.one_of(st.text(ALPHABET, max_size=60), st.text(CHARACTERS, max_size=60))


def kind(character: str) -> str:
    category = unicodedata.category(character)[0]
    if category == "M":
        return "mark"
    if category not in "LN":
        return "separator"
    name = unicodedata.name(character, "")
    alone = any(name.startswith(script) or name.startswith("HALFWIDTH " + script) for script in NO_BLANKS)
    return "alone" if (alone and not character.isascii()) or ord(character) >= 0x20000 else "letter"


def lower(character: str) -> str:
    small = character.lower()
    return small if len(small) == 1 and len(small.encode()) == len(character.encode()) else character


def reference_words(text: str) -> list[tuple[int, str]]:
    """Return the position of each word, in bytes, and the word in lower case."""
    words: list[tuple[int, str]] = []
    before, at = "separator", 0
    for character in text:
        now = kind(character)
        if now != "separator":
            if before == "separator" or now == "alone" or (now == "letter" and before == "alone"):
                words.append((at, ""))
            words[-1] = (words[-1][0], words[-1][1] + lower(character))
        before, at = now, at + len(character.encode())
    return words


def found_words(text: str) -> list[tuple[int, int]]:
    return [
        (int(start), int(stop))
        for words in read_words(pa.array([text]), carried=0)
        for start, stop in zip(words.starts, words.stops, strict=True)
    ]


def hashes_of(texts: list[str], n: int) -> list[list[int]]:
    """Return the n-gram hashes of each text, in order; those that are in two parts of a long text count once."""
    result: list[dict[tuple[int, int], int]] = [{} for _ in texts]
    for words in read_words(pa.array(texts, pa.string()), carried=n - 1):
        grams = ngrams(words, n)
        for document, value, first, last in zip(grams.documents, grams.hashes, grams.first, grams.last, strict=True):
            origin = words.origins[document]
            span = int(words.starts[first] - origin), int(words.stops[last - 1] - origin)
            assert result[words.first_document + document].setdefault(span, int(value)) == value
    return [list(dict(sorted(each.items())).values()) for each in result]


def test_every_character_is_of_the_kind_that_its_name_says() -> None:
    characters = [chr(code) for code in range(0x30000) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    texts = [f"a{character}a" for character in characters]
    result: list[list[tuple[int, int]]] = []
    for words in read_words(pa.array(texts), carried=0):
        offsets = np.stack([words.starts, words.stops], axis=1)
        for document, origin in enumerate(words.origins):
            inside = offsets[words.bounds[document] : words.bounds[document + 1]] - origin
            result.append([(int(start), int(stop)) for start, stop in inside])
    expected = [[(at, at + len(word.encode())) for at, word in reference_words(text)] for text in texts]
    assert {c: a for c, a, b in zip(characters, result, expected, strict=True) if a != b} == {}


def test_every_letter_is_as_its_lower_case() -> None:
    texts = [chr(code) for code in range(0x30000) if kind(chr(code)) in ("letter", "alone")]
    lowered = hashes_of([lower(text) for text in texts], 1)
    assert [text for text, a, b in zip(texts, hashes_of(texts, 1), lowered, strict=True) if a != b] == []


@given(TEXTS)
@settings(max_examples=400)
def test_words_start_and_stop_where_the_reference_says(text: str) -> None:
    expected = [(start, start + len(word.encode())) for start, word in reference_words(text)]
    assert found_words(text) == expected


@given(st.lists(TEXTS, max_size=6), st.integers(1, 7))
@settings(max_examples=200)
def test_ngrams_are_equal_where_their_words_are(texts: list[str], n: int) -> None:
    by_words: dict[tuple[str, ...], int] = {}
    for text, hashes in zip(texts, hashes_of(texts, n), strict=True):
        words = [word for _, word in reference_words(text)]
        grams = [tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, min(1, len(words))))]
        assert len(hashes) == len(grams)
        for gram, value in zip(grams, hashes, strict=True):
            assert by_words.setdefault(gram, value) == value
    assert len(set(by_words.values())) == len(by_words)


@given(TEXTS)
@settings(max_examples=100)
def test_case_punctuation_and_blanks_make_no_difference(text: str) -> None:
    words = "".join(c if c.isascii() and c.isalnum() else " " for c in text).split()
    assert hashes_of([" ".join(words)], 3) == hashes_of(["\n\u201c" + " \u2014, ".join(words).upper() + "!"], 3)


def long_text(document: Callable[[int], str]) -> str:
    parts = [document(number) for number in range(40)]
    parts += ["x" * 5000, "\u4e2d\u6587" * 700, "\u00e9" * 2000, "\U0001f600 " * 900, "one. two\n"]
    return " ".join(parts)


@pytest.mark.parametrize("chunk_bytes", [1100, 1101, 1102, 1103, 4096, 10_000])
def test_a_long_document_has_the_same_ngrams_in_parts_as_whole(
    chunk_bytes: int, document: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [document(1000), long_text(document), "", document(1001), long_text(document)[:-1]]
    whole = hashes_of(texts, 5)
    assert len(whole[1]) > 2000
    monkeypatch.setattr(shingles, "CHUNK_BYTES", chunk_bytes)
    assert hashes_of(texts, 5) == whole
    parts = [words.first_document for words in read_words(pa.array(texts), carried=4)]
    assert parts.count(1) > 2


def test_a_long_document_of_few_words_is_one_ngram_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shingles, "CHUNK_BYTES", 1024)
    text = "one" + " - " * 2000 + "two" + " - " * 2000
    assert hashes_of([text], 5) == hashes_of(["one two"], 5)
    assert hashes_of(["- " * 2000, ""], 5) == [[], []]


def test_what_a_document_says_counts_and_not_where_it_stands(document: Callable[[int], str]) -> None:
    texts = [document(number) for number in range(30)]
    alone = [hashes_of([text], 5)[0] for text in texts]
    assert hashes_of(texts, 5) == alone
    sliced = pa.array(["before", *texts, "behind"]).slice(1, len(texts))
    assert [len(words.bounds) - 1 for words in read_words(sliced, carried=4)] == [len(texts)]
    (words,) = read_words(sliced, carried=4)
    assert sorted(ngrams(words, 5).hashes.tolist()) == sorted(value for each in alone for value in each)


def test_a_word_without_end_is_cut() -> None:
    starts = [start for start, _ in found_words(" " + "a" * (3 * MAX_WORD_BYTES + 1))]
    assert starts == [1 + MAX_WORD_BYTES * number for number in range(4)]


def test_hashes_stay_what_they_are() -> None:
    """Signatures of a data set prepared before must agree with those of a newer version."""
    (values,) = hashes_of(["The quick brown fox, jumps."], 2)
    assert (
        np.array(values, np.uint64).tobytes().hex()
        == "ef647d060b6a1ceb26a84c96ccd5167874b02ddac3e974264ace117efcfc03b1"
    )
