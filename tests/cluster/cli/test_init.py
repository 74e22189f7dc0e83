"""`multihop init`: finds the text in files of every format, and writes a recipe that loads."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from multihop.cluster.cli.main import app
from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.common.errors import UserError

WORDS = [f"{first}{second}{third}" for first in "bdfgk" for second in ("a", "ei", "o", "u") for third in "lmnrst"]


def texts(documents: int, words: int = 100, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) + "." for _ in range(documents)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def init(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["init", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        CliRunner().invoke(app, ["init", *arguments], catch_exceptions=False)
    return str(caught.value)


def loaded(path: str) -> Recipe:
    return load_recipe(Path(path), [])


def test_lines_of_json_whose_text_is_found_by_looking(folder: Path) -> None:
    rows = [{"id": f"doc-{i}", "url": "http://a/b", "stars": 3, "body": text} for i, text in enumerate(texts(400))]
    write_rows(folder / "reviews.jsonl.gz", rows)
    output = init("reviews.jsonl.gz")
    recipe = loaded("reviews.yaml")
    assert "400 documents, text in the field body" in output and "multihop run reviews.yaml" in output
    assert recipe.name == "reviews" and recipe.model.family == "bert" and recipe.objective.name == "mlm"
    assert recipe.data.sources[0].path == "reviews.jsonl.gz" and recipe.data.sources[0].field == "body"


@pytest.mark.parametrize("kind", ["parquet", "arrow", "json"])
def test_tables_and_json(folder: Path, kind: str) -> None:
    table = pa.table({"id": list(range(400)), "content": texts(400), "label": ["good"] * 400})
    path = folder / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_text(json.dumps(table.to_pylist()))
    init(str(path), "--out", "first.yaml", "--causal")
    recipe = loaded("first.yaml")
    assert recipe.data.sources[0].field == "content" and recipe.model.family == "gpt2"


def test_one_text_file_is_taken_by_blocks_or_lines_and_many_as_one_document_each(folder: Path) -> None:
    (folder / "novel.txt").write_text("\n\n".join(texts(400)))
    (folder / "verses.txt").write_text("\n".join(texts(400)))
    (folder / "books").mkdir()
    for number, text in enumerate(texts(200)):
        (folder / "books" / f"{number}.txt").write_text(text)
    init("novel.txt", "verses.txt", "books", "--out", "all.yaml")
    assert [source.documents for source in loaded("all.yaml").data.sources] == ["block", "line", "file"]


def test_a_glob_and_a_name_that_no_run_may_have(folder: Path) -> None:
    (folder / "Über uns").mkdir()
    (folder / "Über uns" / "a.txt").write_text("\n".join(texts(400)))
    init("Über uns/*.txt")
    assert loaded("ber-uns.yaml").name == "ber-uns"


def test_nothing_is_overwritten_without_force(folder: Path) -> None:
    (folder / "verses.txt").write_text("\n".join(texts(400)))
    (folder / "verses.yaml").write_text("mine")
    assert refused("verses.txt") == "verses.yaml exists; choose another --out, or replace it with --force"
    assert (folder / "verses.yaml").read_text() == "mine"
    init("verses.txt", "--force")
    assert loaded("verses.yaml").name == "verses"
    assert "missing is not a directory" in refused("verses.txt", "--out", "missing/a.yaml")


def test_several_fields_are_named_and_one_can_be_chosen(folder: Path) -> None:
    rows = [{"question": a, "answer": b} for a, b in zip(texts(400), texts(400, 150), strict=True)]
    write_rows(folder / "qa.jsonl", rows)
    message = refused("qa.jsonl")
    assert message.startswith("qa.jsonl has several fields that could be the text: answer (on average ")
    assert "question (on average " in message and message.endswith("; choose one with --field answer")
    init("qa.jsonl", "--field", "question")
    assert loaded("qa.yaml").data.sources[0].field == "question"
    assert refused("qa.jsonl", "--field", "body", "--force").startswith("qa.jsonl has no text in the field body;")


def test_what_is_no_text_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "labels.csv").write_text("a,b\n")
    (folder / "pairs.tsv").write_text("a\tb\n")
    (folder / "empty.txt").write_text("")
    (folder / "few.txt").write_text("one two three\n\nfour five six\n")
    write_rows(folder / "numbers.jsonl", [{"id": 1}] * 10)
    assert "gone.txt does not exist; correct the path" in refused("gone.txt")
    assert "labels.csv is a .csv file, but texts to train on are .txt, " in refused("labels.csv")
    assert "`multihop recipes copy translation`" in refused("pairs.tsv")
    assert refused("empty.txt") == (
        "empty.txt has no readable text: its files are empty or not UTF-8; correct the path or the files"
    )
    (folder / "bare").mkdir()
    (folder / "csv").mkdir()
    (folder / "csv" / "verses.txt").write_text("\n".join(texts(400)))
    assert "bare is a directory without files of texts; " in refused("bare")
    assert refused("csv", "--out", "bare", "--force") == "bare is a directory, not a file; choose another --out"
    assert "have about 26 bytes, and a tokenizer and a model learn nothing from less" in refused("few.txt")
    assert "numbers.jsonl has no field with text in its first rows" in refused("numbers.jsonl")
    assert not list(folder.glob("*.yaml"))
    init("csv")  # a directory of this name
    assert loaded("csv.yaml").data.sources[0].path == "csv"


def test_broken_files_between_whole_ones_do_not_matter(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"text": text} for text in texts(400)])
    (folder / "b.parquet").write_bytes(b"PAR1 no parquet")
    (folder / "c.jsonl.gz").write_bytes(b"no gzip")
    init(".", "--out", "first.yaml")
    assert loaded("first.yaml").data.sources[0].field == "text"


def test_documents_without_the_field_are_warned_of(folder: Path) -> None:
    write_rows(folder / "a.jsonl", [{"body" if i % 5 else "title": text} for i, text in enumerate(texts(400))])
    assert (
        "in the field body; about 20 % of its documents or files (by a sample) cannot be used (no field 'body')"
        in init("a.jsonl")
    )
