"""C4's rules: which lines are cut, and which documents are dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.data_prep.config import C4
from multihop.data_prep.rules import c4
from multihop.data_prep.rules.clean import clean
from multihop.data_prep.rules.rule import Document

OFF = C4(
    citations=False,
    terminal_punctuation=False,
    min_line_words=None,
    javascript=False,
    policy=False,
    lorem_ipsum=False,
    curly_bracket=False,
    min_sentences=None,
)
LINES = [
    "This line has more than five words.",
    'He asked me, "Is this a line?"',
    "Home | About us | Contact | More",
    "Too short.",
    "Please enable JavaScript to see all of this page.",
    "By going on you accept our Privacy Policy today.",
    "This goes on and on and on...",
    "It was shown before [12] by others [citation needed] too.",
    "",
]
texts = st.lists(st.sampled_from(LINES), max_size=20).map("\n".join).map(clean)


def reasons(text: str, config: C4) -> list[str]:
    return [reason for reason, drops in c4.make_rules(config) if drops(Document(text))]


def test_lines_that_are_no_sentences_are_cut_and_paragraphs_stay():
    text = clean("\n".join([*LINES[:3], "", *LINES[3:7], "", LINES[7]]))
    assert c4.make_editor(C4())(text) == "\n".join([*LINES[:2], "", "It was shown before by others too."])


@pytest.mark.parametrize(
    ("rule", "cut"),
    [
        ({"citations": True}, {}),
        ({"terminal_punctuation": True}, {LINES[2], LINES[6]}),
        ({"min_line_words": 5}, {"Too short."}),
        ({"javascript": True}, {LINES[4]}),
        ({"policy": True}, {LINES[5]}),
    ],
)
def test_each_rule_cuts_its_lines_alone(rule, cut):
    text = "\n".join(LINES[:8])
    expected = "\n".join(line for line in LINES[:8] if line not in cut)
    if "citations" in rule:
        expected = expected.replace(" [12]", "").replace(" [citation needed]", "")
    assert c4.make_editor(OFF.model_copy(update=rule))(text) == expected
    assert c4.make_editor(OFF)(text) == text


@given(texts)
def test_what_is_left_is_clean_and_is_left_alone_the_second_time(text):
    edit = c4.make_editor(C4())
    edited = edit(text)
    assert clean(edited) == edited
    assert edit(edited) == edited
    assert set(edited.split("\n")) <= {*LINES, "It was shown before by others too."}


def test_terminal_punctuation_is_a_stop_or_an_end_quote_but_no_ellipsis():
    assert all(map(c4.ends_a_sentence, ["Yes.", "Yes?", "Yes!", '"Yes"', "“Yes.”"]))
    assert not any(map(c4.ends_a_sentence, ["Yes", "Yes,", "Yes...", "Yes…", "Yes;", ""]))


def test_documents_are_dropped_for_what_they_hold():
    fine = "One sentence stands here. Another one follows it. This makes three of them."
    assert reasons(fine, C4()) == []
    assert reasons(fine + " Lorem Ipsum dolor.", C4()) == ["holds lorem ipsum"]
    assert reasons(fine + " if (a) { b }.", C4()) == ["holds a curly bracket"]
    assert reasons("One sentence. And two.", C4()) == ["fewer than 3 sentences"]
    assert reasons("One.\nTwo.\nThree.", C4()) == []
    assert reasons("", C4(min_sentences=1)) == ["no line is left", "fewer than 1 sentences"]
    assert reasons("Lorem ipsum {", OFF) == []


def test_bad_words_are_those_of_the_users_list_as_whole_words(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_text("Darn\nhot potato\nill-bred\n坏话\n\n", encoding="utf-8")
    config = OFF.model_copy(update={"bad_words": str(path)})
    for text in ("Oh DARN it.", "A Hot  potato!".replace("  ", " "), "An ill-bred man.", "他说坏话了。", "darn"):
        assert reasons(text, config) == ["holds a bad word"], text
    for text in ("He darned a sock.", "A hot potatoes dish.", "still-bred", "darn_it", "bad words"):
        assert reasons(text, config) == [], text


def test_the_hash_of_a_list_is_of_its_words(tmp_path):
    one, other, third = (tmp_path / name for name in "abc")
    one.write_text("a\nb\n")
    other.write_text("a\r\n\nb")
    third.write_text("a\nc\n")
    assert c4.bad_words_hash(str(one)) == c4.bad_words_hash(str(other)) != c4.bad_words_hash(str(third))


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe\x00"])
def test_a_list_that_cannot_be_used_is_named(tmp_path, content):
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.filters\.c4\.bad_words=.*bad\.txt .*one word per line"):
        c4.make_rules(OFF.model_copy(update={"bad_words": str(path)}))
