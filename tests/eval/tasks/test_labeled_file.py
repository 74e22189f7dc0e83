"""Tasks of the user: a YAML file and the labeled files that it names."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.errors import UserError
from multihop.eval.tasks.known_tasks import open_task
from multihop.eval.tasks.labeled_file import parse_task_file, read_task
from multihop.eval.tasks.task import Example, Task
from multihop.eval.tasks.text_files import columns_of, csv_rows

_CLASSES: dict[str, Any] = {"kind": "classification", "train": "train.csv", "fields": {"text": "said", "label": "mood"}}


def _read(path: Path) -> Task:
    return read_task(path, parse_task_file(path))


def _task(folder: Path, content: dict[str, Any], **files: str) -> Path:
    """Write a YAML file and the files given as train_csv="..."; returns the path of the YAML file."""
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_labels_are_stripped(tmp_path: Path) -> None:
    content = {**_CLASSES, "dev": "dev.csv", "test": "dev.csv"}
    task = _read(
        _task(tmp_path, content, train_csv="said,mood\na,good \nb, bad\n", dev_csv="said,mood\na,good\nb,bad\n")
    )
    assert task.labels == ("bad", "good")
    assert [example.targets for example in task.train] == [example.targets for example in task.dev] == [(1,), (0,)]


def test_a_text_may_be_longer_than_the_csv_modules_default_limit(tmp_path: Path) -> None:
    long = "river " * 60_000
    task = _read(_task(tmp_path, _CLASSES, train_csv=f"said,mood\n{long},good\n" + "a,good\nb,bad\nc,bad\n" * 20))
    assert long in [example.texts[0] for part in (task.train, task.dev, task.test) for example in part]


def test_classes_are_the_sorted_labels_of_the_training_file(tmp_path: Path) -> None:
    content = {**_CLASSES, "dev": "dev.jsonl", "test": "test.tsv"}
    path = _task(
        tmp_path,
        content,
        train_csv='id,said,mood\n1,"a, ""b""\nc",good\n2,d,bad\n3,,odd\n',
        dev_jsonl='{"said": "e", "mood": "odd", "more": [1]}\n\n{"mood": "bad", "said": "f"}\n',
        test_tsv='mood\tsaid\ngood\t"g\n',
    )
    assert parse_task_file(path).kind == "classification"
    task = _read(path)
    assert (task.name, task.kind, task.metric, task.labels) == (
        "task",
        "classification",
        "accuracy",
        ("bad", "good", "odd"),
    )
    assert task.train == (Example(('a, "b"\nc',), (1,)), Example(("d",), (0,)), Example(("",), (2,)))
    assert task.dev == (Example(("e",), (2,)), Example(("f",), (0,)))
    assert task.test == (Example(('"g',), (1,)),) and task.notes == ""


def test_labels_may_be_given_in_their_order(tmp_path: Path) -> None:
    files = {"train_csv": "said,mood\na,1\nb,0\n", "dev_csv": "said,mood\nc,2\n"}
    content = {**_CLASSES, "dev": "dev.csv", "labels": [2, 1, 0], "metric": "macro F1"}
    task = _read(_task(tmp_path, content, **files))
    assert task.labels == ("2", "1", "0") and [e.targets for e in task.train + task.dev] == [(1,), (2,), (0,)]
    assert task.metric == "macro F1" and task.test == ()
    with pytest.raises(UserError, match=r"dev\.csv, line 2: expected one of the labels 0, 1, got '2'"):
        _read(_task(tmp_path, {**_CLASSES, "dev": "dev.csv"}, **files))


def test_pairs_with_scores(tmp_path: Path) -> None:
    content = {
        "kind": "regression",
        "train": "train.jsonl",
        "dev": "train.jsonl",
        "fields": {"text": ["a", "b"], "label": "y"},
    }
    path = _task(tmp_path, content, train_jsonl='{"a": "one", "b": "two", "y": 1.5}\n{"a": "x", "b": 7, "y": "-2"}\n')
    task = _read(path)
    assert task.train == task.dev == (Example(("one", "two"), (1.5,)), Example(("x", "7"), (-2.0,)))
    assert (task.metric, task.labels) == ("Pearson", ())
    _task(tmp_path, content, train_jsonl='{"a": "one", "b": "two", "y": true}\n')
    with pytest.raises(UserError, match=r"train\.jsonl, line 1: expected a number, got 'true'"):
        _read(path)


def test_choices_are_continuations_of_the_context(tmp_path: Path) -> None:
    fields = {"text": "before", "choices": ["a", "b"], "label": "right"}
    content = {"kind": "choice", "train": "train.csv", "dev": "train.csv", "fields": fields}
    task = _read(_task(tmp_path, content, train_csv="before,a,b,right\nriver,one,two,1\n"))
    assert task.train == (Example(("river", "one", "two"), (1,)),) and task.metric == "accuracy"
    named = {**content, "labels": ["A", "B"]}
    task = _read(_task(tmp_path, named, train_csv="before,a,b,right\nriver,one,two,A\n"))
    assert task.train[0].targets == (0,) and task.labels == ()


def test_words_with_labels(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"words": 0, "labels": -1, "scheme": "IOBES"}
    content = {"kind": "tagging", "train": "train.conll", "dev": "dev.txt", "fields": fields}
    files = {"train_conll": "Silver x S-PER\nBay x O\n", "dev_txt": "New x B-PER\nBay x E-PER\n"}
    task = _read(_task(tmp_path, content, **files))
    assert (task.labels, task.metric) == (("O", "B-PER", "I-PER"), "entity F1")
    assert task.train == (Example(("Silver", "Bay"), (1, 0)),) and task.dev == (Example(("New", "Bay"), (1, 2)),)
    plain = {**content, "fields": {**fields, "scheme": "none"}}
    with pytest.raises(UserError, match=r"dev\.txt, line 1: expected one of the labels O, S-PER, got 'B-PER'"):
        _read(_task(tmp_path, plain))
    assert _read(_task(tmp_path, {**plain, "dev": "train.conll"})).metric == "accuracy"


def test_without_a_development_set_examples_of_one_text_stay_together(tmp_path: Path) -> None:
    rows = "".join(f"text {number % 150},{'good' if number % 3 else 'bad'}\n" for number in range(300))
    path = _task(tmp_path, _CLASSES, train_csv=f"said,mood\n{rows}")
    task = _read(path)
    parts = [{example.texts for example in part} for part in (task.train, task.dev, task.test)]
    assert sum(len(part) for part in parts) == len(set.union(*parts)) == 150
    sizes = [len(part) for part in (task.train, task.dev, task.test)]
    assert sum(sizes) == 300 and 0.6 < sizes[0] / 300 < 0.8
    assert task.notes == f"train.csv split {sizes[0]}/{sizes[1]}/{sizes[2]} by a hash of each example's text"
    assert task.fingerprint == _read(path).fingerprint
    given_test = _read(_task(tmp_path, {**_CLASSES, "test": "test.csv"}, test_csv="said,mood\nz,bad\n"))
    assert given_test.dev == task.dev and len(given_test.train) == sizes[0] + sizes[2] and len(given_test.test) == 1


def test_too_few_examples_to_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.yaml: 2 examples are too few to split .*; set dev as well"):
        _read(_task(tmp_path, _CLASSES, train_csv="said,mood\na,good\nb,bad\n"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kind": "parsing"},
            r"yaml: kind: Input should be 'classification', .*, 'translation', 'completion', got 'parsing'",
        ),
        ({"trian": "x"}, "trian: Extra inputs are not permitted"),
        ({"fields": {"text": "said"}}, "fields of kind classification must be text, label, got text"),
        ({"fields": {"text": None, "label": "mood"}}, "fields of kind classification must be text, label"),
        ({"kind": "tagging"}, "fields of kind tagging must be words, labels, got label, text"),
        ({"kind": "tagging", "fields": {"words": 1, "labels": 1}}, "are the same column"),
        ({"kind": "choice"}, "fields of kind choice must be text, choices, label"),
        ({"metric": "Pearson"}, "metric='Pearson' is not for kind classification; choose from accuracy, F1"),
        ({"labels": ["a", "a"]}, "labels must be different names"),
        ({"labels": [True, False]}, "labels.0: Input should be a valid string"),
        ({"kind": "regression", "labels": ["a", "b"]}, "regression has none"),
        ({"train": "missing.csv"}, r"names .*missing\.csv, which is missing"),
        ({"metric": "F1"}, "expected two labels, got bad, fair, good"),
        ({"train": "one.csv"}, "expected at least two labels, got good"),
        ({"train": "bare.csv"}, r"bare\.csv has no examples"),
        ({"train": "empty.csv"}, r"empty\.csv is empty"),
        ({"train": "short.csv"}, r"short\.csv, line 3: expected 2 columns as in the header, got 1"),
        ({"fields": {"text": "text", "label": "mood"}}, r"train\.csv, line 1: expected a header .* found 'said, mood'"),
        ({"train": "broken.jsonl"}, r"broken\.jsonl, line 2: not JSON"),
        ({"train": "half.jsonl"}, r"half\.jsonl, line 1: not JSON \(.*surrogates not allowed"),
        ({"train": "other.jsonl"}, r"other\.jsonl, line 1: expected an object with a text or number in said, mood"),
        ({"train": "list.jsonl"}, r"list\.jsonl, line 1: expected an object"),
        ({"train": "file.dat"}, r"file\.dat has none of the extensions \.csv, .*; set format"),
        ({"train": "words.conll"}, "a column file is for tagging, but kind is classification"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    table = "said,mood\na,good\nb,bad\nc,fair\n"
    files = {
        "train_csv": table, "dev_csv": table, "one_csv": "said,mood\na,good\n", "bare_csv": "said,mood\n",
        "empty_csv": "", "short_csv": "said,mood\na,good\nb\n",
        "half_jsonl": '{"said": "\\ud800", "mood": "good"}\n',
        "broken_jsonl": '{"said": "a", "mood": "good"}\n{"said"\n',
        "other_jsonl": '{"said": "a"}\n', "list_jsonl": "[1]\n", "file_dat": table, "words_conll": "a O\n",
    }  # fmt: skip
    path = _task(tmp_path, {**_CLASSES, "dev": "dev.csv", **change}, **files)
    with pytest.raises(UserError, match=message):
        _read(path)


def test_a_text_is_one_document_and_lines_of_json_are_several(tmp_path: Path) -> None:
    plain = {"kind": "perplexity", "test": "novel.txt"}
    path = _task(tmp_path, plain, novel_txt="One  é\n\n two.\n", reviews_jsonl='{"body": "a\\nb"}\n\n{"body": "c "}\n')
    (tmp_path / "windows.txt").write_bytes("\ufeffOne  é\r\n\r\n two.\r\n".encode())
    assert parse_task_file(path).kind == "perplexity"
    task = _read(path)
    assert (task.name, task.kind, task.metric, task.higher_is_better) == ("task", "zero-shot", "perplexity", False)
    assert task.test == (Example(("One  é\n\n two.",)),) and not task.train and not task.dev
    assert _read(_task(tmp_path, {**plain, "test": "windows.txt"})).fingerprint == task.fingerprint
    lines = {**plain, "test": "reviews.jsonl", "fields": {"text": "body"}}
    assert _read(_task(tmp_path, lines)).test == (Example(("a\nb",)), Example(("c ",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": "good.txt"}, "yaml: train: Extra inputs are not permitted"),
        ({"metric": "accuracy"}, "yaml: metric: Extra inputs are not permitted"),
        ({"test": None}, "yaml: test: Input should be a valid string"),
        ({"test": "missing.txt"}, r"names .*missing\.txt, which is missing"),
        ({"fields": {"text": "body"}}, r"a \.jsonl file needs fields"),
        ({"test": "good.jsonl"}, r"a \.jsonl file needs fields"),
        ({"test": "good.jsonl", "fields": {"text": "body", "label": "mood"}}, "yaml: fields.label: Extra inputs"),
        ({"test": "good.jsonl", "fields": {"text": ["a", "b"]}}, "yaml: fields.text: Input should be a valid string"),
        ({"test": "good.jsonl", "fields": {"text": "text"}}, r"good\.jsonl, line 1: expected an object .* in text"),
        ({"test": "some.jsonl", "fields": {"text": "body"}}, r"some\.jsonl, line 3: expected an object .* in body"),
        ({"test": "blank.jsonl", "fields": {"text": "body"}}, r"blank\.jsonl, line 2: body has no text"),
        ({"test": "none.jsonl", "fields": {"text": "body"}}, r"none\.jsonl has no documents"),
        ({"test": "empty.txt"}, r"empty\.txt is empty"),
        ({"test": "blank.txt"}, r"blank\.txt has no text"),
        ({"test": "latin.txt"}, r"latin\.txt, line 2: byte 3 of the line is not UTF-8"),
    ],
)
def test_mistakes_in_a_text_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    files = {
        "good_txt": "a b\n", "good_jsonl": '{"body": "a"}\n', "some_jsonl": '{"body": "a"}\n\n{"text": "a"}\n',
        "blank_jsonl": '{"body": "a"}\n{"body": " \\n"}\n', "none_jsonl": "\n", "empty_txt": "", "blank_txt": "\n \n",
    }  # fmt: skip
    path = _task(tmp_path, {"kind": "perplexity", "test": "good.txt", **change}, **files)
    (tmp_path / "latin.txt").write_bytes("one\ncaf\u00e9\n".encode("latin-1"))
    with pytest.raises(UserError, match=message):
        _read(path)


def test_a_file_that_is_no_yaml_and_one_of_a_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    for text, message in (
        ("a: [", "is not valid YAML"),
        ("reviews", "the file has no keys; write at least kind"),
        ("", "the file has no keys"),
        ("train: a.csv", "kind is missing; write one of classification, "),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=rf"task\.yaml.*{message}"):
            parse_task_file(path)
    with pytest.raises(UserError, match=r"missing\.yaml does not exist; give the path of a task's YAML file"):
        parse_task_file(tmp_path / "missing.yaml")


_cells = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.lists(_cells, min_size=2, max_size=2), min_size=1, max_size=6))
def test_what_is_written_as_csv_or_json_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "file.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["a", "b"], *rows])
    assert [values for _, values in columns_of(path, csv_rows(path), ("b", "a"))] == [[b, a] for a, b in rows]
    content = {"kind": "regression", "train": "t.jsonl", "dev": "t.jsonl", "fields": {"text": ["a", "b"], "label": "y"}}
    lines = [json.dumps({"a": a, "b": b, "y": 1}, ensure_ascii=False) for a, b in rows]
    task = _read(_task(path.parent, content, t_jsonl="\n".join(lines)))
    assert [list(example.texts) for example in task.train] == rows


def test_an_opened_task_needs_its_yaml_file_no_more_and_reads_its_examples_once(tmp_path: Path) -> None:
    lines = "".join(f"text {i},{'good' if i % 2 else 'bad'}\n" for i in range(100))
    path = _task(tmp_path, _CLASSES, train_csv=f"said,mood\n{lines}")
    source = open_task(str(path), None)
    path.unlink()
    task = source.task
    (tmp_path / "train.csv").unlink()
    assert source.task is task and task.train and source.name == task.name == path.stem
    assert source.reference == str(path.absolute()) and source.is_trained and not source.needs_causal
