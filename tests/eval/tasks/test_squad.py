"""SQuAD's official files: what is read, and what is refused with the id of its question."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.eval.tasks import squad
from multihop.eval.tasks.task import Example

CONTEXT = "The naïve 🐙 lives near Harbour Street. It has 9 brains."


def _question(number: int, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    spans = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": f"56be{number:04x}", "question": f"Question {number}?", "answers": spans, **more}


def _write(folder: Path, name: str, *questions: dict[str, Any], context: str = CONTEXT) -> Path:
    """Write one official file with one paragraph; returns its path."""
    (folder / "squad").mkdir(exist_ok=True)
    path = folder / "squad" / name
    tree = {"version": name, "data": [{"title": "Octopus", "paragraphs": [{"context": context, "qas": [*questions]}]}]}
    path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    return path


def test_offsets_count_code_points_and_all_accepted_answers_are_kept(tmp_path: Path) -> None:
    _write(tmp_path, "train-v1.1.json", _question(1, ("🐙", 10)))
    _write(tmp_path, "dev-v1.1.json", _question(2, ("Harbour Street", 23), ("near Harbour Street", 18)))
    task = squad.read("squad1", str(tmp_path))
    assert (task.name, task.kind, task.metric, task.other_metrics) == (
        "squad1", "spans", "SQuAD F1", ("exact match",),
    )  # fmt: skip
    assert task.train == (Example(("Question 1?", CONTEXT), (10, 11), "56be0001"),)
    assert task.dev == (Example(("Question 2?", CONTEXT), (23, 37, 18, 37), "56be0002"),)
    assert [CONTEXT[start:end] for start, end in ((10, 11), (23, 37))] == ["🐙", "Harbour Street"]
    assert task.test == ()


def test_an_impossible_question_has_no_answer_whatever_looks_plausible(tmp_path: Path) -> None:
    plausible = [{"text": "9", "answer_start": 46}]
    impossible = _question(1, is_impossible=True, plausible_answers=plausible)
    possible = _question(2, ("9", 46), is_impossible=False)
    for part in ("train", "dev"):
        _write(tmp_path, f"{part}-v2.0.json", impossible, possible)
    task = squad.read("squad2", str(tmp_path))
    assert [e.targets for e in task.dev] == [(), (46, 47)]
    assert task.train == task.dev


@pytest.mark.parametrize("start", [9, 11, -1, 500])
def test_an_answer_that_is_not_at_its_offset_is_named(tmp_path: Path, start: int) -> None:
    path = _write(tmp_path, "dev-v1.1.json", _question(7, ("🐙", 10)), _question(8, ("🐙", start)))
    with pytest.raises(UserError, match=rf"dev-v1\.1\.json, question 56be0008: .* at character {start} "):
        squad.read_file("squad1", path)


def test_a_question_without_an_answer_is_refused_unless_it_is_impossible(tmp_path: Path) -> None:
    path = _write(tmp_path, "dev-v2.0.json", _question(1, is_impossible=False))
    with pytest.raises(UserError, match=r"question 56be0001: expected an answer and found 0"):
        squad.read_file("squad2", path)
    path = _write(tmp_path, "dev-v2.0.json", _question(1, ("🐙", 10), is_impossible=True))
    with pytest.raises(UserError, match=r"question 56be0001: expected no answer, .* found 1"):
        squad.read_file("squad2", path)
    path = _write(tmp_path, "dev-v1.1.json", _question(1, is_impossible=True))
    with pytest.raises(UserError, match=r"task squad1 reads the files of SQuAD v1\.1"):
        squad.read_file("squad1", path)


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path, "dev-v2.0.json", _question(1, ("🐙", 10)))
    with pytest.raises(UserError, match=r"dev-v2\.0\.json is not in the format of SQuAD v2\.0 .*is_impossible"):
        squad.read_file("squad2", path)
    with pytest.raises(UserError, match=r"question 56be0001: its context is blank"):
        squad.read_file("squad1", _write(tmp_path, "dev-v1.1.json", _question(1, ("", 0)), context=" \n"))
    with pytest.raises(UserError, match=r"dev-v1\.1\.json has no questions"):
        squad.read_file("squad1", _write(tmp_path, "dev-v1.1.json"))
    with pytest.raises(UserError, match=r"has two questions with the id 56be0001"):
        squad.read_file("squad1", _write(tmp_path, "dev-v1.1.json", *[_question(1, ("🐙", 10))] * 2))
    path.write_text('{"data": [{"paragraphs": [')
    with pytest.raises(UserError, match=r"dev-v2\.0\.json is not a JSON object .*download it again"):
        squad.read_file("squad2", path)
    path.write_text('{"data": ["paragraphs"]}')
    with pytest.raises(UserError, match=r"is not in the format"):
        squad.read_file("squad2", path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": None}, "not in the format .*question is None"),
        ({"question": 7}, "not in the format .*question is 7"),
        ({"answers": [{"text": 9, "answer_start": 46}]}, "not in the format .*text is 9"),
        ({"answers": [{"text": "", "answer_start": 10}]}, "question 56be0001: one of its answers is empty"),
    ],
)
def test_a_value_that_is_not_a_text_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = _write(tmp_path, "dev-v1.1.json", {**_question(1, ("🐙", 10)), **change})
    with pytest.raises(UserError, match=message):
        squad.read_file("squad1", path)


def test_a_missing_file_is_named_with_its_address(tmp_path: Path) -> None:
    _write(tmp_path, "train-v1.1.json", _question(1, ("🐙", 10)))
    with pytest.raises(UserError, match=r"squad1 reads .*/dev-v1\.1\.json, .*download https://.*/dev-v1\.1\.json"):
        squad.find("squad1", str(tmp_path))


def test_reading_imports_no_torch() -> None:
    code = "import sys, eval.tasks.squad; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
