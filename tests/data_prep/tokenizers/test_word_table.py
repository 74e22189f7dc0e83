"""Words that are looked up are those of the text, whatever their bytes, lengths and number are."""

import random
import re
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.data_prep.tokenizers import word_table
from multihop.data_prep.tokenizers.word_table import WordTable


def spell(words: list[str]) -> Iterable[list[int]]:
    """Return the bytes of each word as its tokens, followed by an end token; nothing for an empty word."""
    return ([*word.encode(), 256] if word else [] for word in words)


def expected(texts: list[str], whole: list[int]) -> list[list[int]]:
    words = [[text] if i in whole else re.split("[ \n]", text) for i, text in enumerate(texts)]
    return [[token for spelled in spell(each) for token in spelled] for each in words]


def check(table: WordTable, texts: list[str], whole: list[int]) -> None:
    ids, lengths = table.encode([text.encode() for text in texts], whole)
    assert [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]] == expected(texts, whole)
    assert lengths.sum() == len(ids)


WORD = st.one_of(
    st.text("ab\0é", max_size=20), st.sampled_from(["", "a" * 15, "a" * 16, "b" * 17, "\0", "\0\0", "é" * 8])
)
TEXT = st.lists(st.tuples(WORD, st.sampled_from([" ", "\n", "  "])).map("".join), max_size=12).map("".join)


@given(st.lists(st.lists(st.tuples(TEXT, st.booleans()), max_size=5), min_size=1, max_size=4))
def test_batches_of_any_words(batches: list[list[tuple[str, bool]]]) -> None:
    table = WordTable(spell, b" \n")
    for batch in batches:
        check(table, [text for text, _ in batch], [i for i, (_, is_whole) in enumerate(batch) if is_whole])


def test_more_words_than_the_table_had_room_for() -> None:
    rng = random.Random(0)
    words = [f"{rng.randrange(10 ** rng.randint(1, 18))}" for _ in range(120_000)]
    table = WordTable(spell, b" \n")
    for start in (0, 30_000, 60_000, 0):
        check(table, [" ".join(words[i : i + 100]) for i in range(start, start + 60_000, 100)], [])
    assert len(table) == len({*words}) > 60_000


@given(st.lists(st.lists(TEXT, max_size=5), min_size=1, max_size=4))
def test_words_that_are_cut_without_a_separator(batches: list[list[str]]) -> None:
    cuts = np.zeros((256, 256), bool)
    cuts[ord(" "), [ord("a"), ord("b"), "é".encode()[-1]]] = cuts[ord("a"), ord("b")] = True
    table = WordTable(lambda words: ([*word.encode(), 256] for word in words), cuts=cuts.ravel())
    for batch in batches:
        ids, lengths = table.encode([text.encode() for text in batch])
        words = [re.split("(?<=[abé])(?= )|(?<=b)(?=a)", text) for text in batch]
        spelled = [[token for word in each for token in (*word.encode(), 256)] for each in words]
        assert [part.tolist() for part in np.split(ids, np.cumsum(lengths))[:-1]] == spelled


def test_words_are_forgotten_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_table, "MAX_BYTES", 50_000)
    table = WordTable(spell, b" ")
    sizes = []
    for start in range(0, 3000, 100):
        texts = [f"{number} {'x' * (number % 40)}" for number in range(start, start + 100)]
        ids, _ = table.encode([text.encode() for text in texts])
        assert ids.tolist() == [token for spelled in expected(texts, []) for token in spelled]
        sizes.append(len(table))
    assert max(sizes) < 1000 and sorted(sizes) != sizes
