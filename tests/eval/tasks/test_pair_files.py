"""Test sets for translation that a user describes in a YAML file."""

import gzip
import json
from pathlib import Path

import pytest

from multihop.common.errors import UserError
from multihop.eval.tasks.known_tasks import load_task
from multihop.eval.tasks.task import Task

PAIRS = [("one house", "una casa"), ("two «dogs»", "dos perros"), ("three\tcats", "tres gatos")]
JSONL = "\n".join(json.dumps({"en": en, "es": es}) for en, es in PAIRS)


def task_of(folder: Path, described: str, **files: str | bytes) -> Task:
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "news.yaml").write_text(described)
    return load_task(str(folder / "news.yaml"), None)


def texts_of(task: Task) -> list[tuple[str, ...]]:
    return [example.texts for example in task.test]


def test_each_format_gives_the_same_pairs(tmp_path: Path) -> None:
    fields = "fields: {source: en, target: es}"
    of_json = task_of(tmp_path, f"kind: translation\ntest: a.jsonl\n{fields}", a__jsonl=JSONL)
    assert texts_of(of_json) == PAIRS
    assert (of_json.kind, of_json.metric, dict(of_json.settings)) == (
        "translation",
        "BLEU",
        {"beams": 4, "length_penalty": 0.6},
    )
    packed = gzip.compress(JSONL.encode())
    of_gzip = task_of(tmp_path, f"kind: translation\ntest: a.jsonl.gz\n{fields}", a__jsonl__gz=packed)
    lines = {f"a__{side}": "\n".join(pair[at] for pair in PAIRS) for at, side in enumerate(("en", "es"))}
    of_lines = task_of(tmp_path, "kind: translation\ntest: [a.en, a.es]", **lines)
    assert texts_of(of_gzip) == texts_of(of_lines) == PAIRS
    assert of_json.fingerprint == of_gzip.fingerprint == of_lines.fingerprint

    of_tsv = task_of(tmp_path, "kind: translation\ntest: a.tsv", a__tsv="one house\tuna casa\ntwo\tdos\n")
    assert texts_of(of_tsv) == [("one house", "una casa"), ("two", "dos")]
    turned = task_of(
        tmp_path, "kind: translation\ntest: a.tsv\nfields: {source: 2, target: 1}", a__tsv="one house\tuna casa\n"
    )
    assert texts_of(turned) == [("una casa", "one house")]


def test_how_it_is_searched_is_part_of_the_task(tmp_path: Path) -> None:
    described = "kind: translation\ntest: a.tsv"
    usual = task_of(tmp_path, described, a__tsv="a\tb\n")
    greedy = task_of(tmp_path, f"{described}\nbeams: 1", a__tsv="a\tb\n")
    assert greedy.settings["beams"] == 1 and greedy.fingerprint != usual.fingerprint


@pytest.mark.parametrize(
    ("described", "files", "expected"),
    [
        ("test: a.txt", {"a__txt": "x"}, "is no .jsonl or .tsv file; give two line files as [SOURCE, TARGET]"),
        ("test: a.jsonl", {"a__jsonl": JSONL}, "needs fields such as {source: en, target: es}"),
        ("test: a.tsv\nfields: {source: en, target: es}", {"a__tsv": "a\tb"}, "needs fields such as {source: 1"),
        ("test: a.tsv\nfields: {source: 0, target: 2}", {"a__tsv": "a\tb"}, "columns are counted from 1"),
        ("test: a.tsv\nfields: {source: 2, target: 2}", {"a__tsv": "a\tb"}, "expected two different fields"),
        ("test: [a.en, a.es]\nfields: {source: 1, target: 2}", {"a__en": "a", "a__es": "b"}, "remove fields"),
        ("test: [a.en, a.es]", {"a__en": "a\nb\nc", "a__es": "x\ny"}, "a.en has 3 lines and"),
        ("test: [a.en, a.es]", {"a__en": "a\n\nc", "a__es": "x\ny\nz"}, "line 2: a side of the pair is blank"),
        ("test: a.tsv", {"a__tsv": "a\tb\nalone\n"}, "line 2: expected a column 2, got 1 columns"),
        ("test: b.tsv", {}, "b.tsv, which is missing"),
        (
            "test: a.jsonl\nfields: {source: en, target: de}",
            {"a__jsonl": JSONL},
            "expected an object with a text or number in en, de",
        ),
        (
            "test: a.jsonl.gz\nfields: {source: en, target: es}",
            {"a__jsonl__gz": gzip.compress(JSONL.encode())[:-9]},
            "is not a whole .gz file",
        ),
    ],
)
def test_mistakes(tmp_path: Path, described: str, files: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError) as error:
        task_of(tmp_path, f"kind: translation\n{described}", **files)
    assert expected in str(error.value)


TRIPLES = ["living thing\tis a\twhole", "dog\tis a\tanimal"]
COMPLETION = "kind: completion\ntest: a.tsv\ntrain: b.tsv\nfields: {source: 1, relation: 2, target: 3}"


def test_a_completion_task_has_triples_and_those_of_training(tmp_path: Path) -> None:
    task = task_of(tmp_path, COMPLETION, a__tsv="\n".join(TRIPLES), b__tsv="cat\tis a\tanimal\n")
    assert texts_of(task) == [("living thing <is_a>", "whole"), ("dog <is_a>", "animal")]
    assert [example.texts for example in task.train] == [("cat <is_a>", "animal")]
    assert (task.kind, task.metric, task.higher_is_better) == ("completion", "perplexity", False)
    rows = [dict(zip(("h", "r", "t"), line.split("\t"), strict=True)) for line in TRIPLES]
    described = "kind: completion\ntest: a.jsonl\ntrain: a.jsonl\nfields: {source: h, relation: r, target: t}"
    assert texts_of(task_of(tmp_path, described, a__jsonl="\n".join(map(json.dumps, rows)))) == texts_of(task)


def test_exact_matches_may_be_the_metric(tmp_path: Path) -> None:
    task = task_of(tmp_path, "kind: translation\ntest: a.tsv\nmetric: exact match", a__tsv="a\tb\n")
    assert (
        task.metric == "exact match"
        and task.fingerprint != task_of(tmp_path, "kind: translation\ntest: a.tsv").fingerprint
    )


@pytest.mark.parametrize(
    ("described", "triples", "expected"),
    [
        ("kind: completion\ntest: a.tsv", "a\tb", "kind completion needs train"),
        ("kind: translation\ntest: a.tsv\ntrain: b.tsv", "a\tb", "train=b.tsv is for kind completion"),
        ("kind: completion\ntest: a.tsv\ntrain: b.jsonl", "a\tb", "must be files of one format"),
        ("kind: completion\ntest: a.tsv\ntrain: b.tsv\nmetric: exact match", "a\tb", "is for kind translation"),
        (COMPLETION, "dog\tis a\t \n", "line 1: the head, the tail or the relation of the triple is blank"),
        (COMPLETION, "dog\t \tanimal\n", "line 1: the head, the tail or the relation of the triple is blank"),
        (COMPLETION, "dog\tis a\n", "line 1: expected a column 3, got 2 columns"),
    ],
)
def test_mistakes_of_triples(tmp_path: Path, described: str, triples: str, expected: str) -> None:
    with pytest.raises(UserError) as error:
        task_of(tmp_path, described, a__tsv=triples, b__tsv="cat\tis a\tanimal\n", b__jsonl="{}")
    assert expected in str(error.value)
