"""Wrong input of every kind ends a command with one sentence and exit code 2."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from multihop.cluster.cli.failures import friendly_errors
from multihop.cluster.cli.main import app

RECIPE: dict[str, Any] = {
    "name": "mine",
    "data": {"sources": [{"path": "texts/"}]},
    "model": {"preset": "bert-tiny"},
    "phases": [{"steps": 10}],
}
FILES: dict[str, bytes] = {
    "empty.yaml": b"",
    "comment.yaml": b"# nothing\n",
    "broken.yaml": b"name: [a\n b: }",
    "list.yaml": b"- a\n- b\n",
    "scalar.yaml": b"hello\n",
    "anchor.yaml": b"x: &a 1\nname: *a\n",
    "duplicate.yaml": b"name: a\nname: b\n",
    "tag.yaml": b"name: !!python/object:os.system x\n",
    "tab.yaml": b"data:\n\tsources: []\n",
    "deep.yaml": b"a: " + b"[" * 1000 + b"]" * 1000,
    "numbered.yaml": b"1: 2\n",
    "binary.yaml": bytes(range(256)) * 8,
    "nul.yaml": b"name: a\0b\n",
    "latin.yaml": b"name: caf\xe9\n",
    "utf16.yaml": "name: a\n".encode("utf-16"),
    "two.yaml": b"name: a\n---\nname: b\n",
    "long.yaml": b"name: " + b"a" * 2_000_000,
    "wrong.yaml": b"name: 1\ndata: 2\nmodel: 3\nphases: 4\n",
    "nulls.yaml": b"name: null\ndata: null\nmodel: null\nphases: null\n",
}
EXPERIMENTS = {
    "nowhere": {"recipe": "nowhere.yaml", "runs": {"a": {}}},
    "folder": {"recipe": "folder", "runs": {"a": {}}},
    "unknown-key": {"recipe": "recipe.yaml", "runs": {"a": {"model.sides": 1}}},
    "no-run": {"recipe": "recipe.yaml", "runs": {}},
    "no-name": {"recipe": "recipe.yaml", "runs": ["a"]},
    "bad-name": {"recipe": "recipe.yaml", "runs": {"a b/c": {}}},
}
MISTAKES = [
    *(f"run {name}" for name in FILES),
    *(f"experiment {name}.yaml" for name in EXPERIMENTS),
    *(f"experiment {name}" for name in ("recipe.yaml", "folder", "binary.yaml", "nowhere.yaml")),
    *(f"run {name}" for name in ("folder", "nowhere.yaml", "loop.yaml", "/dev/null", "recipe.yaml", "x" * 5000)),
    *(f"run recipe.yaml --runs {path}" for path in ("file", "file/runs", "/dev/null", "x" * 5000)),
    "run recipe.yaml --runs s3://",
    "compare mine other --runs file",
    "run recipe.yaml --allow-change model.sides",
    "run recipe.yaml --allow-change=",
    *(f"run recipe.yaml engine.deepspeed={path}" for path in ("folder", "file", "nowhere.json", "binary.yaml", "''")),
    *(f"run recipe.yaml {override}" for override in ("name", "=x", "phases[9].steps=1", "phases[0]=1", "name={a:1}")),
    *(f"run recipe.yaml cluster.workers={number}" for number in ("0", "x", "[]", "[3,1]", "[1,2,3]")),
    *(f"run recipe.yaml cluster.address={address}" for address in ("http://[", ":", "localhost:99999", "é.x:1")),
    "run recipe.yaml tracking.experiment=''",
    *(f"data {command} {path}" for command in ("verify", "stats") for path in ("nowhere", "file", "folder")),
    *(f"checkpoints list {path}" for path in ("nowhere", "file", "folder", "broken")),
    *(f"checkpoints export {path} --out out" for path in ("nowhere", "file", "folder", "broken")),
    *(f"checkpoints import {path} --out out" for path in ("nowhere", "file", "folder", "hf")),
    "checkpoints average nowhere --out out",
    *(f"fill-mask {path} x" for path in ("nowhere", "file", "folder", "broken", "foo://x", "hf")),
    "generate nowhere --prompt x",
    "inspect batch recipe.yaml --step 99999999999",
    "inspect batch recipe.yaml --step 0 --rank 1",
    "report mine other --series model.layers",
    "report mine other --series model.sides --x model.layers",
    "doctor nowhere.yaml",
    "doctor binary.yaml",
]
WRONG_USE = [
    *(f"run recipe.yaml --runs {path}" for path in ("s3:", "s3:bucket/runs", "gs://bucket/runs")),
    *(f"compare mine other --runs {path}" for path in ("s3://bucket/runs", "gs://bucket/runs")),
    "runn",
    "run",
    "run recipe.yaml --nothing",
    "run recipe.yaml --runs",
    "run recipe.yaml --verify=3",
    *(f"inspect batch recipe.yaml --step {step}" for step in ("x", "-1 --world-size 0")),
    f"inspect batch recipe.yaml --step 0 --world-size {'9' * 30}",
    *(f"fill-mask mine x --top-k {top}" for top in ("0", "x")),
    *(f"generate mine --prompt x {option} x" for option in ("--temperature", "--top-k", "--top-p", "--seed", "--step")),
    "generate mine --prompt x --max-tokens 0",
    "translate mine --beams 0",
    "embed mine --pooling x",
    "checkpoints average mine --last 1 --out out",
    "checkpoints export mine --to x --out out",
    *(f"ui --port {port}" for port in ("0", "x", "99999999")),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with good and bad files."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for name, experiment in EXPERIMENTS.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump({"question": "Which?", **experiment}))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    Path("file").write_text("x")
    Path("loop.yaml").symlink_to("loop.yaml")
    Path("folder").mkdir()
    for name, file in (("broken", "recipe.json"), ("hf", "config.json")):
        Path(name).mkdir()
        (Path(name) / file).write_text("{")
    return tmp_path


def answer(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Return the exit code and the text on standard error."""
    words = [word.removesuffix("''") for word in command.split(" ")]
    with pytest.raises(SystemExit) as ended, friendly_errors():
        app(words, prog_name="multihop")
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize("command", MISTAKES, ids=lambda command: command[:60])
def test_a_mistake_is_reported_in_one_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(command, capsys)
    assert code == 2, said
    assert said.startswith("multihop: ") and said.count("\n") == 1 and "Errno" not in said, said


@pytest.mark.parametrize("command", WRONG_USE, ids=lambda command: command[:60])
def test_usage_errors_are_reported_by_typer(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer(command, capsys)
    assert code == 2 and said.splitlines()[-1].startswith("Error: "), said


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_errors_of_the_disk_are_reported_in_one_sentence(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, friendly_errors():
        raise OSError(number, os.strerror(number), "/runs/mine")
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith(f"multihop: /runs/mine: {os.strerror(number)}; "), said


def test_a_file_instead_of_a_directory_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = answer("run recipe.yaml --runs file", capsys)
    assert str(folder / "file") in said and os.strerror(errno.EEXIST) not in said
