import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_prep.clean import clean
from data_prep.dedup import content_hash, first_copies, held_out
from data_prep.sentences import split_sentences

WORDS = st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1), max_size=60)


def test_clean_gives_the_same_text_one_spelling():
    assert clean("\ufeffCafe\u0301\r\n\r\n\r\n\r\n  two\t \u00a0words \x00\x07end \n") == "Café\n\ntwo words end"
    assert clean(" \t\r\n\x0c\u2028") == ""


@given(st.text())
def test_clean_is_idempotent_and_leaves_no_control_character(text):
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    assert cleaned == cleaned.strip()
    assert "  " not in cleaned and "\n\n\n" not in cleaned
    assert all(char == "\n" or unicodedata.category(char) != "Cc" for char in cleaned)
    assert unicodedata.is_normalized("NFC", cleaned)


@given(st.text())
def test_clean_loses_no_visible_character(text):
    def visible(some: str) -> str:
        bare = "".join(char for char in some if unicodedata.category(char) != "Cc" and char != "\ufeff")
        return "".join(unicodedata.normalize("NFC", bare).split())

    # NFC of the whole is not always NFC of its parts: compare decomposed.
    assert unicodedata.normalize("NFD", visible(clean(text))) == unicodedata.normalize("NFD", visible(text))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))), st.randoms())
def test_of_equal_contents_exactly_the_first_is_kept(pairs, rng):
    first, second = (np.array([pair[k] for pair in pairs], dtype=np.uint64) for k in (0, 1))
    keep = first_copies(first, second)
    expected = [pair not in pairs[:i] for i, pair in enumerate(pairs)]
    assert keep.tolist() == expected


@given(WORDS, st.floats(0, 0.999), st.floats(0, 0.999))
def test_held_out_documents_stay_held_out_when_the_share_grows(words, one, other):
    second = np.array(words, dtype=np.uint64)
    low, high = sorted((one, other))
    assert not (held_out(second, low) & ~held_out(second, high)).any()
    assert not held_out(second, 0.0).any()


def test_the_held_out_share_is_what_was_asked_and_independent_of_the_id():
    hashes = np.array([content_hash(str(number)) for number in range(20_000)], dtype=np.uint64)
    held = held_out(hashes[:, 1], 0.1)
    assert abs(held.mean() - 0.1) < 0.01
    smallest = np.argsort(hashes[:, 0])[:5_000]
    assert abs(held[smallest].mean() - 0.1) < 0.02


def test_sentences_end_at_stops_and_empty_lines_but_not_at_abbreviations_or_line_ends():
    text = "Dr. Bo went\nhome. He slept!\n\nA title\n\nIt was 3.5 km."
    assert split_sentences(text) == ["Dr. Bo went\nhome.", "He slept!", "A title", "It was 3.5 km."]


@given(st.text(alphabet=st.sampled_from("ab. !?\"'\n,1é日。"), max_size=200))
def test_sentences_lose_nothing_but_blanks(text):
    cleaned = clean(text)
    sentences = split_sentences(cleaned)
    assert "".join("".join(sentences).split()) == "".join(cleaned.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
