"""Column files: words, labels and documents, whatever the scheme of the labels."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from multihop.common.errors import UserError
from multihop.eval.tasks.columns import Scheme, as_iob2, read_columns


def _file(folder: Path, text: str) -> Path:
    path = folder / "words.conll"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("scheme", "labels", "expected"),
    [
        ("IOB1", "I-PER I-PER B-PER O I-LOC I-PER", "B-PER I-PER B-PER O B-LOC B-PER"),
        ("IOB2", "B-PER I-PER B-PER O B-LOC B-PER", "B-PER I-PER B-PER O B-LOC B-PER"),
        # conlleval counts an I without a B before it as the beginning of an entity.
        ("IOB2", "O I-PER I-PER I-LOC", "O B-PER I-PER B-LOC"),
        ("IOBES", "S-PER B-LOC I-LOC E-LOC S-LOC O E-PER", "B-PER B-LOC I-LOC I-LOC B-LOC O B-PER"),
        ("IOBES", "B-PER E-PER I-PER E-PER", "B-PER I-PER B-PER I-PER"),
        ("none", "NN I-PER S-x .", "NN I-PER S-x ."),
    ],
)
def test_entities_are_returned_in_iob2(tmp_path: Path, scheme: Scheme, labels: str, expected: str) -> None:
    path = _file(tmp_path, "".join(f"word {label}\n" for label in labels.split()))
    [(words, read, document)] = read_columns(path, 0, 1, scheme)
    assert (words, read, document) == (("word",) * len(labels.split()), tuple(expected.split()), 0)


_labels = st.lists(st.sampled_from(["O", *(f"{p}-{t}" for p in "BIES" for t in ("PER", "LOC"))]), max_size=12)


@given(_labels.map(lambda labels: [label for label in labels if label[0] in "OBI"]))
def test_what_conlleval_counts_does_not_change(labels: list[str]) -> None:
    converted = list(as_iob2(labels))
    # seqeval's entities are conlleval's.
    assert get_entities(converted) == get_entities(labels)
    assert list(as_iob2(converted)) == converted


@given(_labels)
def test_the_result_is_iob2(labels: list[str]) -> None:
    converted = as_iob2(labels)
    assert [label[2:] for label in converted] == [label[2:] for label in labels]
    for before, label in zip(("O", *converted), converted, strict=False):
        assert label == "O" or label[0] == "B" or (label[0] == "I" and before[2:] == label[2:])


def test_documents_start_at_docstart_and_newdoc_and_lines_of_conll_u_are_understood(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "-DOCSTART- -X- O\n\nRiver NN O\n\n# NN O\n17 CD O\n \n-DOCSTART- -X- O\n\nStone NN O\n",
    )
    assert [(words, document) for words, _, document in read_columns(path, 0, -2, "none")] == [
        (("River",), 1), (("#", "17"), 1), (("Stone",), 2),
    ]  # fmt: skip
    rows = ["1-2\tal\t_", "1\ta\tADP", "2\tel\tDET", "3\tNew York\tPROPN", "3.1\tis\tVERB"]
    heads = ["# newdoc id = a", "# sent_id = 1", "# text = al New York"]
    path = _file(tmp_path, "\n".join([*heads, *rows, "", "# sent_id = 2", rows[1], "", "# newdoc", *rows[1:3]]))
    assert read_columns(path, 1, 2, "none") == (
        (("a", "el", "New York"), ("ADP", "DET", "PROPN"), 1),
        (("a",), ("ADP",), 1),
        (("a", "el"), ("ADP", "DET"), 2),
    )


def test_columns_count_from_either_end_and_sentences_may_differ_in_columns(tmp_path: Path) -> None:
    path = _file(tmp_path, "a b c X\nd e f Y\n\ng h Z\n")
    assert read_columns(path, -2, -1, "none") == ((("c", "f"), ("X", "Y"), 0), (("h",), ("Z",), 0))


@pytest.mark.parametrize("word_column", [0, -2])
def test_words_that_look_like_conll_u_ids_are_kept(tmp_path: Path, word_column: int) -> None:
    path = _file(tmp_path, "Ajax B-ORG\n3-1 O\n2.5 O\n\n1-0 O\n\n1 O\n2 O\nto O\n2.5 O\n")
    read = [words for words, _, _ in read_columns(path, word_column, -1, "IOB2")]
    assert read == [("Ajax", "3-1", "2.5"), ("1-0",), ("1", "2", "to", "2.5")]


def test_lines_are_kept_if_the_first_column_does_not_count_words(tmp_path: Path) -> None:
    path = _file(tmp_path, "2-1 Ajax X\n0.5 won Y\n\n1.1 again Y\n")
    assert [words for words, _, _ in read_columns(path, 1, 2, "none")] == [("Ajax", "won"), ("again",)]


@pytest.mark.parametrize(
    ("lines", "scheme", "message"),
    [
        ("a NN\nb", "none", "line 2: expected 2 columns as in the line before, got 1: 'b'"),
        ("a", "none", "line 1: expected at least 2 columns, got 1"),
        ("a O\n\nb", "IOB2", "line 3: expected at least 2 columns, got 1"),
        ("a O\nb c O", "IOB2", "line 2: expected 2 columns .* got 3"),
        ("a O\nb NN", "IOB2", "line 2: expected a label of IOB2 .*B-TYPE.*, got 'NN'"),
        ("a S-PER", "IOB1", "line 1: expected a label of IOB1 .*, got 'S-PER'"),
        ("a B-", "IOBES", "line 1: expected a label of IOBES .*, got 'B-'"),
        ("", "none", "is empty"),
        ("\n\n-DOCSTART- O\n", "none", "has no sentences"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, lines: str, scheme: Scheme, message: str) -> None:
    with pytest.raises(UserError, match=rf"words\.conll.*{message}"):
        read_columns(_file(tmp_path, lines), 0, -1, scheme)


def test_a_label_that_is_not_known_is_named_as_the_file_has_it(tmp_path: Path) -> None:
    path = _file(tmp_path, "a I-PER\nb I-PER\nc I-SHIP\n")
    with pytest.raises(UserError, match=r"line 3: expected one of the labels O, B-PER, I-PER, got 'I-SHIP'"):
        read_columns(path, 0, 1, "IOB1", ["O", "B-PER", "I-PER"])
    with pytest.raises(UserError, match=r"line 1: expected one of the labels O, I-PER, got 'I-PER'"):
        read_columns(path, 0, 1, "IOB1", ["O", "I-PER"])
