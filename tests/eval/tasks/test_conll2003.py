"""CoNLL-2003 in a directory of the user and in the package: named entities and parts of speech."""

from pathlib import Path

import pytest

from multihop.common.errors import UserError
from multihop.eval.tasks import conll2003

_IOB1 = (
    "-DOCSTART- -X- -X- O\n\nCaptain NNP I-NP I-PER\nSilver NNP I-NP I-PER\nHarbour NNP I-NP I-LOC\n"
    "Bay NNP I-NP B-LOC\n\nsleeps VBZ I-VP O\n\n-DOCSTART- -X- -X- O\n\nHarbour NNP I-NP I-LOC\n"
)
_IOB2 = _IOB1.replace("Captain NNP I-NP I-", "Captain NNP I-NP B-").replace(
    "Harbour NNP I-NP I-", "Harbour NNP I-NP B-"
)


def _own(folder: Path, **files: str) -> str:
    (folder / "conll2003").mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / "conll2003" / f"{name}.txt").write_text(text)
    return str(folder)


def test_both_schemes_give_the_same_entities(tmp_path: Path) -> None:
    task = conll2003.read(_own(tmp_path, train=_IOB1, valid=_IOB2))
    assert (task.kind, task.metric, task.labels) == ("tagging", "entity F1", conll2003.LABELS)
    assert task.train == task.dev and task.test == ()
    assert [example.texts for example in task.train] == [
        ("Captain", "Silver", "Harbour", "Bay"),
        ("sleeps",),
        ("Harbour",),
    ]
    assert [[task.labels[int(t)] for t in example.targets] for example in task.train] == [
        ["B-PER", "I-PER", "B-LOC", "B-LOC"], ["O"], ["B-LOC"],
    ]  # fmt: skip
    assert [example.document for example in task.train] == [1, 1, 2]


def test_parts_of_speech_are_those_of_the_training_file(tmp_path: Path) -> None:
    data = _own(tmp_path, train=_IOB1, valid=_IOB2, test="stone NNP I-NP O\n")
    task = conll2003.read_pos(data)
    assert (task.name, task.kind, task.metric, task.labels) == ("conll2003-pos", "tagging", "accuracy", ("NNP", "VBZ"))
    assert [example.targets for example in task.dev] == [(0, 0, 0, 0), (1,), (0,)] and len(task.test) == 1
    _own(tmp_path, test="stone NNP I-NP O\nrolls VBP I-VP O\n")
    with pytest.raises(UserError, match=r"test\.txt, line 2: expected one of the labels NNP, VBZ, got 'VBP'"):
        conll2003.read_pos(data)


def test_the_package_is_read_where_there_is_no_own_directory(conll: Path, tmp_path: Path) -> None:
    assert conll2003.find(str(tmp_path)) == conll2003.find(None) == conll
    task = conll2003.read(None)
    assert (len(task.train), len(task.dev), len(task.test)) == (120, 30, 30)
    assert conll2003.find(_own(tmp_path, train=_IOB1, valid=_IOB1)) == tmp_path / "conll2003"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"conll2003, where valid\.txt is missing"):
        conll2003.find(_own(tmp_path, train=_IOB1))


@pytest.mark.parametrize(
    "line", ["Captain NNP I-NP", "Captain NNP I-NP I-SHIP", "two words NNP I-NP B-PER", "Captain NNP"]
)
def test_a_line_of_another_format_is_named(tmp_path: Path, line: str) -> None:
    data = _own(tmp_path, train=_IOB1, valid=f"river NN I-NP O\n{line}\n")
    with pytest.raises(UserError, match=r"valid\.txt, line 2: expected"):
        conll2003.read(data)
