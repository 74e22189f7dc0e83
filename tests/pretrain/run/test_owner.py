"""The identity of a run and the ownership of its checkpoints."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.owner import claim_checkpoints
from multihop.pretrain.run.files import read_config


def run_dir(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_a_location_of_checkpoints_belongs_to_one_run(location: str, tmp_path: Path) -> None:
    one, other = (run_dir(tmp_path, name) for name in ("one", "other"))
    for _ in range(2):
        claim_checkpoints(one, f"{location}/shared")
    with pytest.raises(UserError, match="holds the checkpoints of another run"):
        claim_checkpoints(other, f"{location}/shared")
    claim_checkpoints(other, f"{location}/another")


@pytest.mark.parametrize("kind", ["disk", "s3"])
def test_of_many_runs_that_claim_a_place_at_once_one_owns_it(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    location = str(tmp_path / "store") if kind == "disk" else request.getfixturevalue("bucket")
    runs = [run_dir(tmp_path, f"run-{number}") for number in range(4)]
    for attempt in range(20 if kind == "disk" else 3):
        start = threading.Barrier(len(runs))

        def claim(run: Path, attempt: int = attempt, start: threading.Barrier = start) -> bool:
            start.wait()
            try:
                claim_checkpoints(run, f"{location}/{attempt}")
            except ValueError as error:
                return "holds the checkpoints of another run, the one in " not in str(error)
            return True

        with ThreadPoolExecutor(len(runs)) as threads:
            assert sum(threads.map(claim, runs)) == 1


def test_a_store_that_ignores_the_condition_is_found_out(bucket: str, s3: Any, tmp_path: Path) -> None:
    s3.without_header = "HTTP_IF_NONE_MATCH"
    with pytest.raises(
        UserError, match=r"the store of s3://.* does not support conditional writes .*choose a store that does"
    ):
        claim_checkpoints(run_dir(tmp_path, "run"), f"{bucket}/run")


def test_a_copy_of_a_runs_folder_is_another_run_and_a_moved_one_is_not(tmp_path: Path) -> None:
    run, location = run_dir(tmp_path, "run"), str(tmp_path / "store")
    claim_checkpoints(run, location)
    shutil.copytree(run, tmp_path / "copy")
    with pytest.raises(
        UserError, match=rf"the one in {run} on host \S+; choose another name or .*remove its file owner"
    ):
        claim_checkpoints(tmp_path / "copy", location)
    claim_checkpoints(run, location)
    run.rename(tmp_path / "moved")
    claim_checkpoints(tmp_path / "moved", location)
    shutil.copytree(tmp_path / "moved", run)  # where the run has been before
    with pytest.raises(UserError, match=rf"the one in {tmp_path / 'moved'} on host"):
        claim_checkpoints(run, location)
    (tmp_path / "store" / "owner").unlink()
    claim_checkpoints(run, location)


def test_a_run_that_is_restored_to_its_place_goes_on(tmp_path: Path) -> None:
    run, location = run_dir(tmp_path, "run"), str(tmp_path / "store")
    claim_checkpoints(run, location)
    shutil.copytree(run, tmp_path / "backup")
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "backup", run)
    claim_checkpoints(run, location)


def test_on_a_shared_file_system_another_host_sees_the_same_run(tmp_path: Path) -> None:
    run, location = run_dir(tmp_path, "run"), tmp_path / "store"
    claim_checkpoints(run, str(location))
    owner = json.loads((location / "owner").read_text())
    (location / "owner").write_text(json.dumps({**owner, "host": "another", "run_dir": "/mnt/there/run"}))
    claim_checkpoints(run, str(location))
    assert json.loads((location / "owner").read_text()) == owner


def test_checkpoints_in_a_runs_folder_are_copied_with_it(tmp_path: Path) -> None:
    run = run_dir(tmp_path, "run")
    claim_checkpoints(run, str(run / "checkpoints"))
    shutil.copytree(run, tmp_path / "copy")
    claim_checkpoints(tmp_path / "copy", str(tmp_path / "copy" / "checkpoints"))
    (tmp_path / "linked").mkdir()
    shutil.copy(run / "identity", tmp_path / "linked")
    (tmp_path / "linked" / "checkpoints").symlink_to(run / "checkpoints")
    with pytest.raises(UserError, match=f"the one in {run} on host"):
        claim_checkpoints(tmp_path / "linked", str(tmp_path / "linked" / "checkpoints"))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"run": "x"}', b'{"run": 3}', b'{"a": ' * 100, b"\xff"])
def test_an_owner_or_identity_that_says_nothing_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    run, location = run_dir(tmp_path, "run"), tmp_path / "store"
    claim_checkpoints(run, str(location))
    for file, advice in (
        (location / "owner", "or remove it if the checkpoints"),
        (run / "identity", "restore it from"),
    ):
        before = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(UserError, match=rf"{file} .*; .*{advice}") as refused:
            claim_checkpoints(run, str(location))
        assert "\n" not in str(refused.value)
        file.write_bytes(before)


def test_a_place_that_cannot_be_written_to_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        claim_checkpoints(run_dir(tmp_path, "run"), str(tmp_path / "file"))


def test_a_recipe_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe.json is missing"):
        read_config(tmp_path)
    (tmp_path / "recipe.json").write_text(
        json.dumps({"model": {"preset": "bert-tiny"}, "phases": [{"steps": 3}], "engine": {"micro_batch_size": 0}})
    )
    with pytest.raises(UserError, match=r"engine: .*micro_batch_size=0 is not a number of samples") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value) and "pydantic" not in str(error.value)
