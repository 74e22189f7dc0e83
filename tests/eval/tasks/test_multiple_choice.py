"""Made-up CSV files of SWAG and JSON files of RACE."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.eval.tasks import multiple_choice
from multihop.eval.tasks.task import Example

_HEADER = [
    "",
    "video-id",
    "fold-ind",
    "startphrase",
    "sent1",
    "sent2",
    "gold-source",
    *(f"ending{i}" for i in range(4)),
]


def _swag(folder: Path, name: str, rows: list[list[Any]], header: list[str]) -> str:
    (folder / "swag").mkdir(exist_ok=True)
    with (folder / "swag" / name).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(folder)


def _swag_row(label: list[int]) -> list[Any]:
    endings = ["rolls, slowly.", 'says "stone".', "stops.", "two\nlines."]
    return [0, "film_1", 77, "The river is wide. It", "The river is wide.", "It", "gold", *endings, *label]


def test_swag_continues_the_second_sentence(tmp_path: Path) -> None:
    for name in ("train.csv", "val.csv"):
        data = _swag(tmp_path, name, [_swag_row([2]), _swag_row([0])], [*_HEADER, "label"])
    task = multiple_choice.read("swag", data)
    texts = ("The river is wide.", "It rolls, slowly.", 'It says "stone".', "It stops.", "It two\nlines.")
    assert task.train == task.dev == (Example(texts, (2,)), Example(texts, (0,)))
    assert (task.kind, task.metric, task.test, task.unlabeled) == ("choice", "accuracy", (), {})


def test_broken_rows_of_swag_are_named_by_their_first_line(tmp_path: Path) -> None:
    data = _swag(tmp_path, "val.csv", [_swag_row([2])], [*_HEADER, "label"])
    for wrong, message in (
        ([4], "expected one of the labels 0, 1, 2, 3, got '4'"),
        ([], "expected 12 columns .* got 11"),
    ):
        _swag(tmp_path, "train.csv", [_swag_row([2]), _swag_row(wrong)], [*_HEADER, "label"])
        with pytest.raises(UserError, match=rf"train\.csv, line 4: {message}"):
            multiple_choice.read("swag", data)
    _swag(tmp_path, "train.csv", [], [*_HEADER, "label"])
    with pytest.raises(UserError, match=r"train\.csv has a header and no examples"):
        multiple_choice.read("swag", data)
    _swag(tmp_path, "train.csv", [], _HEADER)
    with pytest.raises(UserError, match=r"train\.csv, line 1: expected a header with the columns .*label, found"):
        multiple_choice.read("swag", data)
    (tmp_path / "swag" / "train.csv").write_text(f'{",".join([*_HEADER, "label"])}\n1,"never closed\n2\n')
    with pytest.raises(UserError, match=r"train\.csv, line 2: the row is not CSV"):
        multiple_choice.read("swag", data)


def _passage(**other: Any) -> dict[str, Any]:
    options = [["stone", "river", "letter", "bay"], ["It is\\1.", "So.", "No.", "Yes."]]
    questions = ["The _ is wide.", "Why is it wide?"]
    return {
        "article": "A river.", "questions": questions, "options": options, "answers": ["B", "D"], "id": "m", **other
    }  # fmt: skip


def _race(folder: Path, passage: dict[str, Any]) -> str:
    for part in ("train", "dev", "test"):
        for level in ("middle", "high"):
            path = folder / "RACE" / part / level / "1.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**passage, "article": f"{part} {level}"}))
    return str(folder)


def test_race_puts_the_option_in_place_of_the_blank_or_after_the_question(tmp_path: Path) -> None:
    data = _race(tmp_path, _passage())
    task = multiple_choice.read("race-high", data)
    blank, question = task.train
    assert blank.texts[:3] == ("train high", "The stone is wide.", "The river is wide.") and blank.targets == (1,)
    assert question.texts[:2] == ("train high", "Why is it wide? It is\\1.") and question.targets == (3,)
    assert (task.kind, task.metric, len(task.dev), task.test[0].texts[0]) == ("choice", "accuracy", 2, "test high")
    both = multiple_choice.read("race", data)
    assert both.train == multiple_choice.read("race-middle", data).train + task.train


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"answers": ["B", "E"]}, r"is not a file of RACE \(answers\.1: .*'A', 'B', 'C' or 'D'"),
        ({"options": [["a", "b", "c", "d"], ["a", "b", "c"]]}, r"is not a file of RACE \(options\.1: "),
        ({"questions": ["One?"]}, "has 1 questions, 2 lists of options and 2 answers"),
        ({"article": None}, r"is not a file of RACE"),
    ],
)
def test_another_content_than_races_is_named(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    data = _race(tmp_path, _passage())
    path = tmp_path / "RACE" / "dev" / "high" / "1.txt"
    path.write_text(json.dumps(_passage(**other)))
    with pytest.raises(UserError, match=rf"dev/high/1\.txt {message}"):
        multiple_choice.read("race", data)
    path.write_text("An article.")
    with pytest.raises(UserError, match=r"dev/high/1\.txt is not a JSON object .*; unpack RACE's archive again"):
        multiple_choice.read("race", data)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"swag, where these are missing: train\.csv, val\.csv; get them from https://github"
    ):
        multiple_choice.find("swag", str(tmp_path))
    (tmp_path / "RACE" / "train" / "middle").mkdir(parents=True)
    with pytest.raises(UserError, match="RACE, where these are missing: dev/middle;"):
        multiple_choice.find("race-middle", str(tmp_path))
    (tmp_path / "RACE" / "dev" / "middle").mkdir(parents=True)
    with pytest.raises(UserError, match=r"expected \.txt files of RACE in .*train/middle, found none"):
        multiple_choice.read("race-middle", str(tmp_path))
