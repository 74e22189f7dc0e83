# ruff: noqa: RUF001 — curly quotes
"""Cleaning: one spelling, nothing visible lost, and the result of a simple implementation."""

import random
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.data_prep.config import CleanConfig
from multihop.data_prep.rules import clean as clean_module
from multihop.data_prep.rules.clean import clean, dependencies

# What each step of cleaning looks for, so that texts which need several of them are common.
CONTROLS = "\t\r\x00\x0b\x0c\x1c\x1f\x7f\x80\x85\x9f\u200b\u2028\u2029\ufeff"
BLANKS = " \n\xa0\u1680\u2000\u3000"
texts = st.text() | st.text(st.sampled_from(BLANKS * 2 + CONTROLS + "ab\xad\u0301\u1100\u1161é’日"))
MOJIBAKE = ["Ã¼", "Ã", "¼", "â€™", "â", "€", "\x80", "\x99", "ü", "a", " ", "é", "Â\xa0", "\n"]
mojibake = st.lists(st.sampled_from(MOJIBAKE)).map("".join)


def plainly_cleaned(text: str) -> str:
    """Return the same result by the shortest code, at a tenth of the speed."""
    table: dict[int, str | None] = {code: None for code in (*range(0x20), *range(0x7F, 0xA0), 0xFEFF)}
    table |= {code: "\n" for code in (0x0A, 0x0B, 0x0C, 0x85, 0x2028, 0x2029)} | {0x09: " "}
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n").translate(table))
    text = re.sub(r" ?\n ?", "\n", re.sub(r"[^\S\n]+", " ", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def test_clean_gives_the_same_text_one_spelling():
    assert clean("\ufeffCafe\u0301\r\n\r\n\r\n\r\n  two\t \u00a0words \x00\x07end \n") == "Café\n\ntwo words end"
    assert clean(" \t\r\n\x0c\u2028") == ""
    assert clean("one\x0btwo\x0cthree\x85four\u2029five\rsix") == "one\ntwo\nthree\nfour\nfive\nsix"
    assert clean("zero\u200bwidth and soft\xadhyphen stay") == "zero\u200bwidth and soft\xadhyphen stay"
    assert clean("\u1100\u1161 \u2126 \ufb01") == "\uac00 \u03a9 \ufb01"  # canonical forms, no compatibility forms
    assert clean("a  \n   \n \n  b") == "a\n\nb"


@given(texts)
def test_clean_gives_what_the_plain_way_gives(text):
    assert clean(text) == plainly_cleaned(text)


def test_clean_gives_what_the_plain_way_gives_for_every_character_of_the_first_planes():
    for code in range(0x20000):
        text = f"a{chr(code)}b {chr(code)}\n{chr(code)}c{chr(code)}\u0301"
        assert clean(text) == plainly_cleaned(text), hex(code)


@given(texts)
def test_clean_is_idempotent_and_leaves_no_control_character(text):
    cleaned = clean(text)
    assert clean(cleaned) == cleaned
    assert cleaned == cleaned.strip()
    assert "  " not in cleaned and "\n\n\n" not in cleaned
    assert all(char == "\n" or unicodedata.category(char) != "Cc" for char in cleaned)
    assert unicodedata.is_normalized("NFC", cleaned)


@given(texts)
def test_clean_loses_no_visible_character(text):
    def visible(some: str) -> str:
        bare = "".join(char for char in some if unicodedata.category(char) != "Cc" and char != "\ufeff")
        return "".join(unicodedata.normalize("NFC", bare).split())

    # NFC of the whole is not always NFC of its parts: compare decomposed.
    assert unicodedata.normalize("NFD", visible(clean(text))) == unicodedata.normalize("NFD", visible(text))


def test_mojibake_is_repaired_when_it_is_requested_and_only_then():
    broken = "Das ist schÃ¶n, sagte sie, und â€žwahrâ€œ.\r\n\r\n\r\nPlain text  stays."
    assert clean(broken, fix_mojibake=True) == "Das ist schön, sagte sie, und „wahr“.\n\nPlain text stays."
    assert clean(broken) == "Das ist schÃ¶n, sagte sie, und â€žwahrâ€œ.\n\nPlain text stays."
    assert clean("Curly “quotes”, ﬁ and &amp; stay", fix_mojibake=True) == "Curly “quotes”, ﬁ and &amp; stay"


@given(texts | mojibake)
def test_repaired_text_is_clean_and_repairing_it_again_changes_nothing(text):
    repaired = clean(text, fix_mojibake=True)
    assert clean(repaired) == repaired
    assert clean(repaired, fix_mojibake=True) == repaired


def test_a_missing_ftfy_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(UserError, match="pip install 'multihop\\[text\\]'"):
        clean("schÃ¶n", fix_mojibake=True)
    with pytest.raises(UserError, match="pip install 'multihop\\[text\\]'"):
        dependencies(CleanConfig(fix_mojibake=True))


def test_what_repairing_depends_on_is_reported():
    assert dependencies(CleanConfig()) == {}
    assert dependencies(CleanConfig(fix_mojibake=True))["mojibake"].startswith("ftfy ")


@given(st.text("\u0301\u0323\u0345\u0334\u0344\u05b0\u302a\U0001d165ae\u00e9\u1e69 ", max_size=60))
def test_long_mark_run_pattern_are_sorted_like_short_ones(text: str) -> None:
    with pytest.MonkeyPatch.context() as few:
        few.setattr(clean_module, "_LONG_RUN", 2)
        clean_module._mark_run_pattern.cache_clear()
        sorted_before = clean(text)
    clean_module._mark_run_pattern.cache_clear()
    assert sorted_before == clean(text)


def test_a_megabyte_of_marks_on_one_letter() -> None:
    """In quadratic time this would take a quarter of an hour."""
    draw = random.Random(0)
    text = clean("e" + "".join(draw.choices("\u0301\u0323\u0345\u0334", k=400_000)) + " a")
    assert text.startswith("\u1eb9\u0334\u0334") and text.endswith("\u0345 a")
    assert unicodedata.is_normalized("NFC", text)
