"""A run's folder: who may write into it, what a refused start leaves, and files that others may have put into it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import make_run

from multihop.cluster.locks import is_locked, lock_folder
from multihop.cluster.runs.compare import compare
from multihop.cluster.runs.folder import locked_run_dir
from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.cluster.runs.summary import read_summary
from multihop.common.errors import UserError
from multihop.common.json_lines import append_row, read_rows
from multihop.pretrain.checkpoint.owner import claim_checkpoints
from multihop.pretrain.run.files import checkpoints_of, read_config

ROOT = Path(__file__).parents[3]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.chdir(ROOT)
    return load_recipe(ROOT / "recipes" / "demo-bert.yaml", [f"checkpoint.location={tmp_path}/store", "name=a"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "a"


def start_and_fail(run_dir: Path, recipe: Recipe, *made: str) -> None:
    """Start, create these files, and end with a mistake of the user."""
    with pytest.raises(UserError, match="a late mistake"), locked_run_dir(run_dir, recipe, ()):
        for name in made:
            (run_dir / name).parent.mkdir(exist_ok=True)
            (run_dir / name).write_text("{}\n")
        (run_dir / "data").symlink_to("../.prepared/k")
        raise UserError("a late mistake")


def test_a_mistake_found_at_the_end_of_a_first_start_loses_nothing(run_dir: Path, recipe: Recipe) -> None:
    location = checkpoints_of(run_dir, recipe)
    made = ("metrics.jsonl", "eval/results.jsonl", "logs/rank-0.log", "launches.jsonl")
    with pytest.raises(UserError, match="a late mistake"), locked_run_dir(run_dir, recipe, ()):
        claim_checkpoints(run_dir, location)
        for name in made:
            append_row(run_dir / name, {"step": 1})
        raise UserError("a late mistake")
    assert [read_rows(run_dir / name) for name in made] == [[{"step": 1}]] * len(made)
    with locked_run_dir(run_dir, recipe, ()):
        claim_checkpoints(run_dir, location)


@pytest.mark.parametrize("kept", ["metrics.jsonl", "identity", "logs/rank-0.log", "eval/results.jsonl", "notes.txt"])
def test_any_one_file_of_worth_keeps_the_folder(run_dir: Path, recipe: Recipe, kept: str) -> None:
    start_and_fail(run_dir, recipe, "index/a.npy", "summary.json", kept)
    assert (run_dir / kept).exists() and (run_dir / "recipe.json").exists() and (run_dir / "index/a.npy").exists()


def test_a_first_start_refused_before_its_ranks_began_leaves_nothing(run_dir: Path, recipe: Recipe) -> None:
    (run_dir.parent / ".prepared" / "k").mkdir(parents=True)
    start_and_fail(run_dir, recipe, "index/a.npy", "index/a.json", "summary.json", "tracking.json")
    assert os.listdir(run_dir.parent) == [".prepared"] and (run_dir.parent / ".prepared" / "k").is_dir()


def test_an_error_that_is_not_the_users_removes_nothing(run_dir: Path, recipe: Recipe) -> None:
    with pytest.raises(ValueError, match="shapes do not match"), locked_run_dir(run_dir, recipe, ()):
        raise ValueError("shapes do not match")
    assert (run_dir / "recipe.json").exists()


def test_what_existed_before_a_refused_start_stays(run_dir: Path, recipe: Recipe) -> None:
    (run_dir / "index").mkdir(parents=True)
    (run_dir / "index" / "mine.npy").write_text("")
    start_and_fail(run_dir, recipe, "summary.json")
    assert {path.name for path in run_dir.iterdir()} == {"index", ".lock"}
    assert (run_dir / "index" / "mine.npy").exists()


def test_a_later_start_that_is_refused_removes_nothing(run_dir: Path, recipe: Recipe) -> None:
    with locked_run_dir(run_dir, recipe, ()):
        pass
    start_and_fail(run_dir, recipe, "summary.json")
    assert {"recipe.json", "summary.json", "data"} <= set(os.listdir(run_dir))


def test_phases_that_end_before_the_newest_checkpoint_are_refused_and_change_nothing(
    run_dir: Path, bert_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    with locked_run_dir(run_dir, shorter(9), ()):
        (make_run(tmp_path / "other", bert_data, "bert") / "checkpoints").rename(run_dir / "checkpoints")
    before = (run_dir / "recipe.json").read_bytes()
    allowed = ["phases[0].steps"]
    with (
        pytest.raises(UserError, match=r"trained to step 7, and its phases now have 6"),
        locked_run_dir(run_dir, shorter(6), allowed),
    ):
        pass
    assert (run_dir / "recipe.json").read_bytes() == before and not (run_dir / "changes.jsonl").exists()
    with locked_run_dir(run_dir, shorter(7), allowed):
        pass


def shorter(steps: int) -> Recipe:
    return load_recipe(ROOT / "recipes" / "demo-bert.yaml", [f"phases[0].steps={steps}", "name=a"])


def test_a_name_that_is_a_file_is_a_sentence(run_dir: Path, recipe: Recipe) -> None:
    run_dir.parent.mkdir()
    run_dir.write_text("")
    with (
        pytest.raises(UserError, match=r"runs/a is not a directory; choose another name"),
        locked_run_dir(run_dir, recipe, ()),
    ):
        pass


def test_a_folder_of_runs_that_cannot_be_created_is_a_sentence(recipe: Recipe) -> None:
    with (
        pytest.raises(UserError, match=r"^/proc/runs cannot be created; choose another --runs"),
        locked_run_dir(Path("/proc/runs/a"), recipe, ()),
    ):
        pass


def test_the_second_holder_is_refused_with_the_first_also_when_the_lock_is_removed(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, multihop.cluster.locks as f\nwith f.lock_folder(pathlib.Path(sys.argv[1])): print('in')"
    )

    def another() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout

    with lock_folder(tmp_path):
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match=rf"is in use by process {os.getpid()} on "), lock_folder(tmp_path):
            pass
        assert another() == ""
    assert another() == "in\n" and not (tmp_path / ".holder").exists()


def test_whether_a_folder_is_held_is_seen_without_a_touch_of_its_lock(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    code = "import os; from pathlib import Path; from multihop.cluster.locks import lock_folder\n"
    code += f"with lock_folder(Path({str(tmp_path)!r})): os._exit(1)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert (tmp_path / ".holder").exists() and not is_locked(tmp_path), "its holder was killed"
    (tmp_path / ".holder").write_text("process 1 on another-host\n")
    assert is_locked(tmp_path)


def test_nothing_is_written_through_a_link(tmp_path: Path, run_dir: Path, recipe: Recipe) -> None:
    ours = tmp_path / "mine"
    ours.write_text("my settings\n")
    with locked_run_dir(run_dir, recipe, ()):
        pass
    (run_dir / ".holder").symlink_to(ours)
    with locked_run_dir(run_dir, recipe, ()):
        pass
    for name in (".lock", "worker.lock", "logs/rank-0.log", "metrics.jsonl", "eval/results.jsonl"):
        link = run_dir / name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(ours)
        with (
            pytest.raises(UserError, match=rf"a/{name} is a link or not a regular file"),
            locked_run_dir(run_dir, recipe, ()),
        ):
            pass
        link.unlink()
    os.mkfifo(run_dir / "metrics.jsonl")
    with (
        pytest.raises(UserError, match=r"a/metrics\.jsonl is a link or not a regular file"),
        locked_run_dir(run_dir, recipe, ()),
    ):
        pass
    for name in ("results.jsonl", "launches.jsonl", "changes.jsonl"):
        (run_dir / name).symlink_to(ours)
        with pytest.raises(UserError, match=rf"a/{name} is a link or not a regular file"):
            append_row(run_dir / name, {"step": 1})
    assert ours.read_text() == "my settings\n"


@pytest.mark.parametrize("name", ["eval", "index", "logs"])
def test_a_folder_that_is_written_into_is_no_link(tmp_path: Path, run_dir: Path, recipe: Recipe, name: str) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / name).symlink_to(tmp_path)
    with pytest.raises(UserError, match=rf"a/{name} is a link"), locked_run_dir(run_dir, recipe, ()):
        pass


def test_a_run_its_data_and_its_checkpoints_may_be_links(tmp_path: Path, run_dir: Path, recipe: Recipe) -> None:
    run_dir.parent.mkdir()
    (tmp_path / "large-disk" / "run").mkdir(parents=True)
    run_dir.symlink_to(tmp_path / "large-disk" / "run")
    for name in ("data", "checkpoints"):
        (run_dir / name).symlink_to(tmp_path / "large-disk")
    with locked_run_dir(run_dir, recipe, ()):
        append_row(run_dir / "eval" / "results.jsonl", {"task": "a"})
    assert (tmp_path / "large-disk" / "run" / "recipe.json").exists()


@pytest.mark.parametrize("content", [b"", b'{"name": "a', b"\0" * 64, b"[]", b'{"a":' * 5000, b"\xff{}"])
def test_a_damaged_file_is_named_with_what_to_do(run_dir: Path, recipe: Recipe, content: bytes) -> None:
    run_dir.mkdir(parents=True)
    for name in ("recipe.json", "summary.json"):
        (run_dir / name).write_bytes(content)
    damaged = r"runs/a/{} is not a JSON object \(.*\); {}"
    with pytest.raises(UserError, match=damaged.format("recipe.json", "restore it from a copy, or set name=")):
        locked_run_dir(run_dir, recipe, ()).__enter__()
    with pytest.raises(UserError, match=damaged.format("recipe.json", "restore it from a copy")):
        read_config(run_dir)
    with pytest.raises(UserError, match=damaged.format("recipe.json", "restore it from a copy")):
        compare([run_dir])
    with pytest.raises(UserError, match=damaged.format("summary.json", "remove it")):
        read_summary(run_dir)


@pytest.mark.parametrize("content", [{"stages": [1]}, {"stages": {"prep": "long"}}])
def test_a_summary_of_other_kinds_is_named(run_dir: Path, content: object) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "summary.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"summary\.json: stages does not map stage names to seconds; remove it"):
        read_summary(run_dir)


def test_new_folders_are_synced_in_the_ones_above(
    tmp_path: Path, run_dir: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set[Path](), os.fsync

    def noting(descriptor: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    with locked_run_dir(run_dir, recipe, ()):
        append_row(run_dir / "eval" / "results.jsonl", {"task": "a"})
    made = [run_dir.parent, run_dir, run_dir / "eval", run_dir / "eval" / "results.jsonl", run_dir / "recipe.json"]
    assert {path.parent for path in made} <= synced and run_dir / "eval" / "results.jsonl" in synced


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "multihop-test", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk here")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_reported_by_name_and_lets_go_of_the_lock(small_disk: Path) -> None:
    results, filler = small_disk / "results.jsonl", small_disk / "filler"
    append_row(results, {"task": "a"})
    with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(OSError, match=r"No space left on device: '.*/results\.jsonl'"):
        append_row(results, {"note": "y" * 5000})
    with pytest.raises(OSError, match=r"No space left on device: '.*/\.holder'"), lock_folder(small_disk):
        pass
    assert results.read_bytes() == b'{"task": "a"}\n' and [path.name for path in small_disk.glob(".*")] == [".lock"]
    filler.unlink()
    with lock_folder(small_disk):
        append_row(results, {"task": "b"})
    assert read_rows(results) == [{"task": "a"}, {"task": "b"}]
