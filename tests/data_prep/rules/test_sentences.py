# ruff: noqa: RUF001 — punctuation of many scripts
"""Sentences: where they end in several languages, that no character is lost, and that long texts are fast."""

from itertools import pairwise

import pytest
import sentencex
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from multihop.data_prep.config import Source
from multihop.data_prep.rules import sentences
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.sentences import sentence_spans, split_sentences

LANGUAGES = ["en", "de", "fr", "es", "ru", "hy", "ar", "hi", "am", "my", "ja", "zh", "th", "xx"]
PIECES = [
    *"abAB1 ..!?\n\n\"'()«»“”‘’「」。！？।\u3000\xa0é日Д\u0301\r\t\u2028",
    "Dr.",
    "e.g. ",
    "Yahoo!",
    "[1]",
    "\n\n",
    "1. ",
]
texts = st.text(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=80).map("".join)


def test_sentences_end_at_stops_and_empty_lines_but_not_at_abbreviations_or_line_ends():
    text = "Dr. Bo went\nhome. He slept!\n\nA title\n\nIt was 3.5 km."
    assert split_sentences(text) == ["Dr. Bo went\nhome.", "He slept!", "A title", "It was 3.5 km."]
    assert sentence_spans(text) == [(0, 17), (18, 27), (29, 36), (38, 52)]


def test_english_sentences_are_those_of_before_there_were_spans():
    text = clean(
        'Mrs. Vale (née Orr) left at 5 p.m. on Jan. 3. "Stay!" he cried. "Why?" She asked, e.g. about tea… Nobody.\n'
        "Prices rose 4.5% vs. last year, i.e. a lot. See Fig. 2 and J. R. Stone et al. [12] Then it ended.\n\n"
        "What?! No... Yes. www.example.org is a site. Mail me@example.org. 1. First thing. 2. Second."
    )
    assert split_sentences(text) == [
        "Mrs. Vale (née Orr) left at 5 p.m. on Jan. 3.",
        '"Stay!" he cried.',
        '"Why?"',
        "She asked, e.g. about tea… Nobody.",
        "Prices rose 4.5% vs. last year, i.e. a lot.",
        "See Fig. 2 and J. R. Stone et al. [12]",
        "Then it ended.",
        "What?!",
        "No...",
        "Yes.",
        "www.example.org is a site.",
        "Mail me@example.org.",
        "1.",
        "First thing.",
        "2.",
        "Second.",
    ]


@pytest.mark.parametrize(
    ("language", "expected"),
    [
        ("de", ["Am 3. Januar kam z. B. Dr. Weiß.", "Er blieb bis 5 Uhr.", "Dann ging er."]),
        ("fr", ["Elle est arrivée à 5 h.", "« Bonjour ! » dit-il.", "Puis il partit."]),
        ("ru", ["Он пришёл в 5 часов.", "Было темно!", "Почему?"]),
        ("el", ["Πού πας;", "Πάω σπίτι."]),
        ("hi", ["यह एक वाक्य है।", "वह घर गया।"]),
        ("ja", ["今日は晴れです。", "明日は雨でしょう。", "本当に？"]),
        ("zh", ["今天天气很好。", "我们去公园吧！", "你呢？"]),
        ("ar", ["وصل القطار متأخرا.", "هل أنت جاهز؟", "نعم."]),
        ("am", ["ዛሬ ጥሩ ቀን ነው።", "ነገ እንገናኛለን።"]),
    ],
)
def test_sentences_of_several_languages(language, expected):
    for blank in ("", " ") if language in ("ja", "zh") else (" ",):
        assert split_sentences(blank.join(expected), language) == expected


def test_a_source_tells_its_language_by_a_code():
    assert Source(path="x").language == "en"
    assert [Source(path="x", language=code).language for code in ("de", "grc", "zh-hans")] == ["de", "grc", "zh-hans"]
    for wrong in ("English", "EN", "", "e"):
        with pytest.raises(ValidationError, match="language"):
            Source(path="x", language=wrong)


@given(texts, st.sampled_from(LANGUAGES))
def test_every_visible_character_lies_in_exactly_one_span_and_spans_are_in_order(text, language):
    spans = sentence_spans(text, language)
    assert all(start < stop for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(text[start:stop] == text[start:stop].strip() for start, stop in spans)
    inside = {offset for start, stop in spans for offset in range(start, stop)}
    assert inside >= {offset for offset, char in enumerate(text) if not char.isspace()}


@given(texts.map(clean), st.sampled_from(LANGUAGES))
def test_a_text_of_usual_length_has_the_sentences_of_sentencex(text, language):
    of_sentencex = [bare for sentence in sentencex.segment(language, text) if (bare := sentence.strip())]
    assert split_sentences(text, language) == of_sentencex


def test_long_texts_of_paragraphs_have_the_sentences_of_sentencex_at_the_right_offsets():
    # Beyond ten thousand characters sentencex gives some empty lines not back.
    text = clean("\n\n".join(f"Paragraph {n} is short. It ends here.\nOr here, é!" for n in range(1_000)))
    pieces = sentencex.segment("en", text)
    assert len("".join(pieces)) < len(text) < sentences.CHUNK
    assert split_sentences(text) == [bare for piece in pieces if (bare := piece.strip())]
    assert len(split_sentences(text)) == 3_000


def test_what_a_segmenter_leaves_out_or_alters_is_not_lost(monkeypatch):
    monkeypatch.setattr(sentencex, "segment", lambda language, text: ["One.", "Trois.", "Four."])
    assert split_sentences("Zero. One. Two.  Three. Four. Five. ") == [
        "Zero.",
        "One.",
        "Two.  Three.",
        "Four.",
        "Five.",
    ]


def test_a_text_of_many_paragraphs_has_the_same_sentences_in_chunks_as_whole(monkeypatch):
    text = "\n\n".join(
        f"Paragraph {n} says “Yes. No.” to (all. of) it!\nAnd ends. So 'it was. Is' it" for n in range(90)
    )
    whole = sentence_spans(text)
    assert len(whole) > 200
    monkeypatch.setattr(sentences, "CHUNK", 400)
    assert sentence_spans(text) == whole


@pytest.mark.parametrize(
    "text",
    [
        "word " * 60_000,
        "x" * 300_000,
        "A!b?" * 75_000,
        "今天天气很好。" * 40_000,
        "He «said. Then " * 4_000,
        "1. A\n" * 20_000,
    ],
    ids=["no stops", "no blanks", "stops without blanks", "Chinese", "open quotes", "a list"],
)
def test_long_texts_without_ends_are_given_to_sentencex_in_chunks(text):
    # Whole, each of these takes minutes, or hours for 64 MiB.
    spans = sentence_spans(text)
    assert "".join(text[start:stop] for start, stop in spans).replace(" ", "").replace("\n", "") == "".join(
        text.split()
    )


def test_chinese_without_blanks_ends_at_the_same_stops_as_with_sentencex():
    text = "今天天气很好。我们去公园吧！你呢？" * 200
    assert split_sentences(text, "zh") == ["今天天气很好。", "我们去公园吧！", "你呢？"] * 200


def test_a_long_line_that_ends_with_a_stop_is_a_paragraph_below_a_list_too():
    paragraph = "The river was wide and slow, and on its other side stood a house in which nobody had lived for years."
    text = "The list:\n\n1. First item.\n2. Second item.\n" + "\n".join([paragraph] * 3)
    result = split_sentences(text)
    assert result[-2:] == [paragraph] * 2 and all(len(sentence) < 2 * len(paragraph) for sentence in result)
