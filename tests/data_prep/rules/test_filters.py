"""The filter as a whole: which rules are on, in which order, and the reported reasons."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.data_prep.config import FilterConfig
from multihop.data_prep.rules import languages
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.filters import DroppedDocument, dependencies, drop_reasons, make_filter

PROSE = (
    "The harbour was quiet that morning, and nobody had seen the boats leave with the tide. A boy of ten or so sat on "
    "the wall to watch the gulls. He would have liked to be a sailor, but his mother had plans of her own for him, and "
    "she did not care for the sea. Later the fog came in from the west and hid everything."
)
GERMAN = "Der Hafen war an diesem Morgen still, und niemand hatte die Boote mit der Flut auslaufen sehen."
ALL = FilterConfig.model_validate(
    {"c4": {}, "language": {"keep": ["en"]}, "gopher_quality": {}, "gopher_repetition": {}}
)


def test_nothing_is_dropped_unless_a_group_is_named():
    keep = make_filter(FilterConfig())
    assert [keep(text) for text in ("", "x", GERMAN)] == ["", "x", GERMAN]
    assert drop_reasons(FilterConfig()) == []
    assert dependencies(FilterConfig()) == {}


def test_good_prose_passes_all_rules_unchanged():
    assert make_filter(ALL)(PROSE) == PROSE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Home\nAbout us", "no line is left"),
        ("Home\nAbout\n" + PROSE.replace("boats", "{boats}"), "holds a curly bracket"),
        ("Short words. Only two sentences here.", "fewer than 3 sentences"),
        (GERMAN + " Es war kalt. Er ging nach Hause.", "in a language that is not kept"),
        ("It is so. We go on. He says it all the time to us.", "fewer than 50 words"),
        ("\n".join([PROSE, PROSE]), "more than 0.3 of the lines repeat others"),
    ],
)
def test_the_first_rule_that_drops_a_document_is_its_reason(text, reason):
    result = make_filter(ALL)(clean(text))
    assert result == DroppedDocument(reason)
    assert reason in drop_reasons(ALL)


def test_lines_are_cut_before_documents_are_judged():
    text = f"Menu | Home | {{login}}\n{PROSE}\nAll rights reserved"
    assert make_filter(ALL)(text) == PROSE
    assert make_filter(FilterConfig.model_validate({"gopher_quality": {}}))(text) == text


@given(st.lists(st.sampled_from([*PROSE.split(), "\n\n", "\n", "...", "#", "[1]", "{"]), max_size=150).map(" ".join))
def test_every_reason_is_announced_and_the_answer_is_always_the_same(text):
    config = FilterConfig.model_validate({"c4": {}, "gopher_quality": {}, "gopher_repetition": {}})
    text = clean(text)
    result = make_filter(config)(text)
    assert result == make_filter(config)(text)
    if isinstance(result, DroppedDocument):
        assert result.reason in drop_reasons(config)
    else:
        assert clean(result) == result
        assert make_filter(config)(result) == result


def test_threads_may_share_a_filter():
    keep = make_filter(ALL)
    texts = [PROSE, GERMAN, PROSE + "\n" + PROSE, "x"] * 20
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(keep, texts)) == list(map(keep, texts))


def test_reasons_tell_the_thresholds_that_were_set():
    config = FilterConfig.model_validate(
        {"gopher_quality": {"min_words": 7, "min_stop_words": None}, "language": {"keep": ["de"], "min_score": 0.25}}
    )
    reasons = drop_reasons(config)
    assert reasons[:3] == ["in a language that is not kept", "language less probable than 0.25", "fewer than 7 words"]
    assert not any("stop words" in reason for reason in reasons)


def test_what_the_result_depends_on_besides_the_recipe_is_reported(tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("darn\n")
    config = FilterConfig.model_validate({"c4": {"bad_words": str(words)}, "language": {"keep": ["en"]}})
    before = dependencies(config)
    assert before.keys() == {"bad_words", "languages", "sentences"}
    words.write_text("darn\nheck\n")
    assert dependencies(config)["bad_words"] != before["bad_words"]


@pytest.mark.parametrize(
    "given",
    [
        {"gopher_quality": {"min_words": 0}},
        {"gopher_quality": {"max_bullet_lines": 1.5}},
        {"gopher_repetition": {"max_top_5gram": 0.1}},
        {"language": {"keep": []}},
        {"language": {}},
    ],
)
def test_impossible_settings_are_refused(given):
    with pytest.raises(ValidationError):
        FilterConfig.model_validate(given)


def test_an_unknown_language_is_named():
    with pytest.raises(UserError, match=r"data\.filters\.language\.keep holds english, expected codes from .*\ben\b"):
        make_filter(FilterConfig.model_validate({"language": {"keep": ["en", "english"]}}))


def test_a_missing_language_model_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    languages._model.cache_clear()
    with pytest.raises(UserError, match="pip install 'multihop\\[text\\]'"):
        make_filter(ALL)
