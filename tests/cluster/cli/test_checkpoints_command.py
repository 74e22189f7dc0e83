"""The commands `multihop checkpoints list` and `verify`."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from multihop.cluster.cli.main import app
from multihop.common.errors import UserError
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import load_weights
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.run.find_checkpoint import run_dir_of


def save(checkpoints: Path | str, step: int, value: float = 1.0) -> Path:
    writers = [CheckpointWriter(str(checkpoints), rank, 2, "a", keep=9) for rank in (0, 1)]
    manifest = CheckpointManifest(
        step=step,
        tokens=1000 * step,
        updates=step,
        world_size=2,
        zero_stage=2,
        parameters={"a": [30, 2], "b": [4]},
        data_fingerprint="d",
    )
    writers[0].save({"weight/a@0": torch.full((60,), value)}, manifest)
    writers[1].save({"weight/b@0": torch.ones(4)}, manifest)
    for writer in writers:
        writer.wait()
    return Path(folder_of_step(str(checkpoints), step))


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two good checkpoints, one incomplete one and one that was set aside."""
    for step in (100, 1200):
        save(tmp_path / "checkpoints", step)
    (tmp_path / "checkpoints" / "step-00001300").mkdir()
    (tmp_path / "checkpoints" / "step-00000200.damaged-ab12").mkdir()
    (tmp_path / "recipe.json").write_text(
        json.dumps({"name": "r", "model": {"preset": "bert-tiny"}, "phases": [{"steps": 3}]})
    )
    return tmp_path


def test_list(run: Path) -> None:
    rows = json.loads(invoke("list", "--json", str(run)).stdout)
    assert [row["folder"] for row in rows] == [
        "step-00000100",
        "step-00001200",
        "step-00001300",
        "step-00000200.damaged-ab12",
    ]
    assert [row["committed"] for row in rows] == [True, True, False, False]
    described = {key: rows[1][key] for key in ("step", "ranks", "zero_stage", "parameters", "tokens")}
    assert described == {"step": 1200, "ranks": 2, "zero_stage": 2, "parameters": 64, "tokens": 1_200_000}
    assert rows[1]["bytes"] == sum(
        path.stat().st_size for path in (run / "checkpoints" / "step-00001200").glob("*.safetensors")
    )
    assert rows[1]["date"].startswith("20")
    shown = invoke("list", str(run)).stdout
    assert "1,200,000" in shown and "never committed" in shown and "renamed because it is damaged" in shown
    assert shown == invoke("list", str(run / "checkpoints") + "/").stdout


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_run_in_an_object_store_with_its_audits(bucket: str, is_copied: bool, tmp_path: Path) -> None:
    """A run that was trained with `--runs s3://…`, or that was copied to a bucket from a disk."""
    location = f"{bucket}/r/checkpoints" if is_copied else f"{bucket}/.checkpoints/r"
    run = open_folder(f"{bucket}/r")
    for step in (100, 200):
        save(location, step)
    recipe = {"name": "r", "model": {"preset": "bert-tiny"}, "phases": [{"steps": 3}]}
    recipe |= {"checkpoint": {"location": None if is_copied else f"{bucket}/.checkpoints"}, "not-read": "x" * 2**20}
    run.write_atomically("recipe.json", json.dumps(recipe).encode())
    content = read_checkpoint_manifest(folder_of_step(location, 200)).content_hash()
    row = {"first": 100, "last": 200, "of": content, "is_equal": True, "conditions": []}
    run.write_atomically("audits.jsonl", json.dumps(row).encode() + b'\n{"of": "torn')
    rows = json.loads(invoke("list", "--json", run.location).stdout)
    assert [(row["step"], row["audit"]) for row in rows] == [(100, None), (200, "audited")]
    assert invoke("verify", run.location).stdout == "step-00000100  good\nstep-00000200  good\n"
    with pytest.raises(UserError, match="r has no tokenizer; give the run's directory, whose data has it"):
        CliRunner().invoke(
            app, ["checkpoints", "export", run.location, "--out", str(tmp_path / "hf")], catch_exceptions=False
        )


def test_verify_what_is_good(run: Path) -> None:
    result = invoke("verify", str(run))
    assert result.exit_code == 0
    assert "step-00000100  good\nstep-00001200  good\nstep-00001300  never committed" in result.stdout
    assert [row["good"] for row in json.loads(invoke("verify", "--json", str(run)).stdout)] == [True, True, True]


def test_verify_names_every_damaged_file(run: Path) -> None:
    older = run / "checkpoints" / "step-00000100"
    names = sorted(path.name for path in older.glob("*.safetensors"))
    for name in names:
        data = bytearray((older / name).read_bytes())
        data[-1] ^= 1
        (older / name).write_bytes(data)
    (run / "checkpoints" / "step-00001200" / "manifest.json").write_bytes(b"{}")
    result = invoke("verify", str(run))
    assert result.exit_code == 1
    for name in names:
        assert f"step-00000100/{name} is damaged: its SHA-256" in result.stdout
    assert "step-00001200/manifest.json is damaged" in result.stdout and "rerun the training command" in result.stdout
    result = invoke("verify", "--json", str(run))
    assert result.exit_code == 1
    assert [len(row["damages"]) for row in json.loads(result.stdout)] == [2, 1, 0]
    assert "manifest.json is damaged" in invoke("list", str(run)).stdout


def test_what_is_no_checkpoint_of_its_folder_is_a_sentence(run: Path) -> None:
    """A FIFO in place of a file, a checkpoint with the name of another step, and a file in place of a folder."""
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / "step-00000100", checkpoints / "step-00000500")
    file = next((checkpoints / "step-00001200").glob("rank-0001*.safetensors"))
    file.unlink()
    os.mkfifo(file)
    (checkpoints / "step-00002000").write_text("no folder")
    result = invoke("verify", str(run))
    assert result.exit_code == 1 and "step-00000100  good\n" in result.stdout
    assert "step-00000500 holds the checkpoint of step 100, not that of the step in its name" in result.stdout
    assert f"{file} is damaged: it cannot be read (not a regular file)" in result.stdout
    assert "step-00002000" not in result.stdout
    rows = {row["folder"]: row for row in json.loads(invoke("list", "--json", str(run)).stdout)}
    assert not rows["step-00000500"]["committed"] and "of step 100" in rows["step-00000500"]["note"]


def test_a_run_whose_checkpoints_are_elsewhere(run: Path, tmp_path: Path) -> None:
    recipe = json.loads((run / "recipe.json").read_text())
    elsewhere = tmp_path / "elsewhere"
    save(elsewhere / "r", 7)
    (run / "recipe.json").write_text(json.dumps({**recipe, "checkpoint": {"location": str(elsewhere)}}))
    assert [row["step"] for row in json.loads(invoke("list", "--json", str(run)).stdout)] == [7]


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for command in ("list", "verify"):
        result = invoke(command, str(tmp_path))
        assert isinstance(result.exception, ValueError)
        assert "holds no checkpoints; give a run's directory" in str(result.exception)


def test_only_a_run_is_audited(run: Path) -> None:
    result = invoke("audit", str(run / "checkpoints"))
    assert "is not a run, because it has no recipe.json; give a run's name or directory" in str(result.exception)


def test_average(tmp_path: Path) -> None:
    for step, value in ((1, 100.0), (2, 1.0), (3, 2.0), (4, 6.0)):
        save(tmp_path / "checkpoints", step, value)
    (tmp_path / "checkpoints" / "step-00000005").mkdir()
    out = tmp_path / "averaged"
    made = invoke("average", str(tmp_path / "checkpoints"), "--last", "3", "--out", str(out))
    assert made.exit_code == 0 and "3 newest checkpoints" in made.stdout, made.output

    weights = load_weights(folder_of_step(str(out), 4))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == {"a": (30, 2), "b": (4,)}
    assert torch.equal(weights["a"], torch.full((30, 2), 3.0)) and torch.equal(weights["b"], torch.ones(4))
    before, after = (
        read_checkpoint_manifest(folder_of_step(str(location), 4)) for location in (tmp_path / "checkpoints", out)
    )
    assert after.run != before.run and after.parent == before.content_hash() and after.kinds == ["weight"]
    assert invoke("verify", str(out)).exit_code == 0


def test_an_average_finds_the_data_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    for step in (1, 2):
        save(run / "checkpoints", step)
    for out in (run / "averaged", tmp_path / "elsewhere" / "averaged"):
        made = invoke("average", str(run / "checkpoints"), "--last", "2", "--out", str(out))
        assert made.exit_code == 0, made.output
        assert (run_dir_of(str(out)) / "data").resolve() == run / "data"
        assert invoke("verify", str(out)).exit_code == 0
    assert not (run / "averaged" / "data").exists()


def test_average_refuses(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)
    too_many = invoke("average", str(tmp_path / "checkpoints"), "--out", str(tmp_path / "out"))
    assert "has 2 committed checkpoints, and --last 5 needs more; set checkpoint.keep" in str(too_many.exception)

    file = next((tmp_path / "checkpoints" / "step-00000001").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    damaged = invoke("average", str(tmp_path / "checkpoints"), "--last", "2", "--out", str(tmp_path / "out"))
    assert "is damaged" in str(damaged.exception)
    assert not (tmp_path / "out").exists()
