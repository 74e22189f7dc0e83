"""What a start and a save remove, and what they keep: everything that the run did not write itself."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from s3_endpoint import S3
from saved_tensors import LAUNCH, RUN, as_given, manifest_of, rank_file, rewrite_manifest, save, whole

from multihop.common.files import sha256_file
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.owner import claim_checkpoints
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify import list_steps, load_weights, newest_good, newest_step, verify
from multihop.pretrain.checkpoint.writer import CheckpointWriter

NOW = f"{RUN[:8]}-0000bbbb"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archived_checkpoint_that_is_linked_back_stays_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, archive = tmp_path / "checkpoints", tmp_path / "archive"
    for step in (1, 2, 3):
        save(checkpoints, step, 1)
    archive.mkdir()
    shutil.move(checkpoints / "step-00000001", archive)
    (checkpoints / "step-00000001").symlink_to(archive / "step-00000001")
    before = files(archive)
    for step in (4, 5):
        save(checkpoints, step, 1, keep=2)
    assert files(archive) == before and list_steps(str(checkpoints)) == [1, 4, 5]
    assert verify(folder_of_step(str(checkpoints), 1)).step == 1  # it may be read
    assert "left step-00000001 alone, which is older than what is kept: it is a link and not a directory" in caplog.text
    assert "left step-00000001 alone, which is a link and not a directory" in sweep(str(checkpoints), 5, NOW)
    assert files(archive) == before


def test_a_first_start_leaves_what_others_put_into_its_place(location: str, tmp_path: Path) -> None:
    theirs = {"step-00000001": ["model.pt", "thesis.tex"], "step-000000002": ["rank-0000.safetensors"]}
    for folder, names in theirs.items():
        for name in names:
            open_folder(f"{location}/checkpoints/{folder}").write_atomically(name, b"theirs")
    (tmp_path / "run").mkdir()
    run = claim_checkpoints(tmp_path / "run", f"{location}/checkpoints")
    (said,) = sweep(f"{location}/checkpoints", None, f"{run[:8]}-b")
    assert said == ("left step-00000001 alone, which contains files that this run did not write (model.pt, thesis.tex)")
    for folder, names in theirs.items():
        assert open_folder(f"{location}/checkpoints/{folder}").names() == names
    save(f"{location}/checkpoints", 1, 2, keep=1)  # beside them
    save(f"{location}/checkpoints", 2, 2, keep=1)
    assert newest_step(f"{location}/checkpoints") == 2
    assert open_folder(f"{location}/checkpoints/step-00000001").names() == ["model.pt", "thesis.tex"]


def test_another_runs_checkpoints_are_neither_removed_nor_renamed(tmp_path: Path) -> None:
    other = f"{'f' * 8}-b"
    save(tmp_path, 1, 1)
    save(tmp_path, 2, 1)
    damaged = tmp_path / "step-00000002" / rank_file(0)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    save(tmp_path, 3, 1)
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    before = files(tmp_path)
    assert sweep(str(tmp_path), 1, other) == [
        "left step-00000002 alone, which does not verify and was not written by this run: no checkpoint of step 2 can "
        "be saved until it is moved away",
        f"left step-00000003 alone, which contains files that this run did not write ({rank_file(0)[:-12]}.done, "
        f"{rank_file(0)})",
    ]
    assert files(tmp_path) == before
    manifest = manifest_of(4, 1, {"norm.bias": [9]}).model_copy(update={"run": "f" * 32})
    writer = CheckpointWriter(str(tmp_path), 0, 1, other, keep=1)
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest)
    writer.wait()
    assert before.items() <= files(tmp_path).items()
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest.model_copy(update={"step": 1}))
    with pytest.raises(OSError, match=r"another run's checkpoint has that name and is kept; move it away"):
        writer.wait()
    assert before.items() <= files(tmp_path).items()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_neither_followed_nor_removed(tmp_path: Path, kind: str) -> None:
    checkpoints, precious = tmp_path / "checkpoints", tmp_path / "precious"
    precious.mkdir()
    (precious / "mine").write_text("x")
    checkpoints.mkdir()
    in_the_way = checkpoints / "step-00000002"
    in_the_way.symlink_to(precious) if kind == "link" else in_the_way.write_text("x")
    assert sweep(str(checkpoints), None, NOW) == [
        f"left step-00000002 alone, which is a {kind} and not a directory: no checkpoint of step 2 can be saved until "
        "it is moved away"
    ]
    with pytest.raises(OSError, match=r"step 2 could not be saved .*a link or a file has that name"):
        save(checkpoints, 2, 1)
    assert files(precious) == {"mine": b"x"} and os.path.lexists(in_the_way)
    save(checkpoints, 3, 1, keep=1)
    assert os.path.lexists(in_the_way)


def test_a_checkpoint_under_another_steps_name_is_refused_and_nothing_else_is_touched(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save(tmp_path, step, 1)
    shutil.copytree(tmp_path / "step-00000100", tmp_path / "step-00000500")
    good = {name: data for name, data in files(tmp_path).items() if "500" not in name}
    found, rejected = newest_good(str(tmp_path))
    assert found is not None and found.step == newest_step(str(tmp_path)) == 400
    assert rejected == [
        f"{tmp_path}/step-00000500 holds the checkpoint of step 100, not that of the step in its name; rename it to "
        "step-00000100, or remove it if there is one of that name"
    ]
    assert sweep(str(tmp_path), found.step, NOW) == [
        "renamed step-00000500, which does not verify, to step-00000500.damaged-0000bbbb"
    ]
    assert good.items() <= files(tmp_path).items()
    save(tmp_path, 500, 1, keep=4)
    assert verify(folder_of_step(str(tmp_path), 500)).step == 500 and good.items() - files(tmp_path).items() == {
        (name, data) for name, data in good.items() if "100" in name
    }


def test_what_a_start_before_left_is_cleared_away(tmp_path: Path) -> None:
    committed, half = Path(save(tmp_path, 1, 1)), Path(save(tmp_path, 2, 1))
    before = files(committed)
    (half / "manifest.json").rename(half / f".manifest.json.{LAUNCH}.tmp")
    (half / f".{rank_file(1)}.77-ab.tmp").write_bytes(b"half")
    for late in (f"rank-0001.{RUN[:8]}-0000cccc.safetensors", f".rank-0001.{RUN[:8]}-0000cccc.done.1-a.tmp"):
        (committed / late).write_bytes(b"late")
    (tmp_path / "step-00000003").mkdir()
    assert sweep(str(tmp_path), 1, NOW) == [
        "removed step-00000002, which was never committed",
        "removed step-00000003, which was never committed",
    ]
    assert list_steps(str(tmp_path)) == [1] and files(committed) == before


def test_what_is_damaged_beyond_reading_is_set_aside_where_all_of_it_is_the_runs(tmp_path: Path) -> None:
    for step in (1, 2):
        (Path(save(tmp_path, step, 1)) / "manifest.json").write_bytes(b"{")
    (tmp_path / "step-00000002" / "notes").write_text("mine")
    said = sweep(str(tmp_path), None, NOW)
    assert said[0] == "renamed step-00000001, which does not verify, to step-00000001.damaged-0000bbbb"
    assert said[1].startswith("left step-00000002 alone, which does not verify and was not written by this run")


def version_2(checkpoints: Path, step: int) -> Path:
    """Write a checkpoint of format version 2, which does not record the run that wrote it."""
    folder = checkpoints / f"step-{step:08d}"
    shutil.copytree(save(checkpoints.with_name("new"), step, 1), folder)
    file = (folder / rank_file(0)).rename(folder / "rank-0000.safetensors")
    (folder / f"rank-0000.{LAUNCH}.done").rename(folder / "rank-0000.done")
    entry = {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}
    rewrite_manifest(folder, without=("run", "kinds", "stripes"), format_version=2, files=[entry])
    return folder


def test_the_second_format_version_is_read_and_kept_by_its_run(tmp_path: Path) -> None:
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    run.mkdir()
    checkpoints.mkdir()
    for step in (1, 2, 3):
        folder = version_2(checkpoints, step)
    assert as_given(verify(str(folder))) == manifest_of(3, 1).model_copy(update={"run": None})
    assert all(torch.equal(tensor, whole(3)[name]) for name, tensor in load_weights(str(folder)).items())
    for file in (run / "identity", checkpoints / "owner"):
        file.write_text(RUN)
    assert claim_checkpoints(run, str(checkpoints)) == RUN  # as before, and says more from now on
    assert json.loads((checkpoints / "owner").read_text())["run"] == RUN
    (checkpoints / "step-00000003" / "manifest.json").write_bytes(b"torn")
    assert sweep(str(checkpoints), 2, NOW) == [
        "renamed step-00000003, which does not verify, to step-00000003.damaged-0000bbbb"
    ]
    save(checkpoints, 4, 1, keep=1)
    assert list_steps(str(checkpoints)) == [4]


def test_checkpoints_of_nobody_are_not_taken_for_the_runs(tmp_path: Path) -> None:
    """The checkpoints are of format version 2, in a location that this run has only now claimed."""
    run, checkpoints = tmp_path / "run", tmp_path / "checkpoints"
    run.mkdir()
    checkpoints.mkdir()
    before = files(version_2(checkpoints, 1))
    start = f"{claim_checkpoints(run, str(checkpoints))[:8]}-b"
    for step in (2, 3):
        writer = CheckpointWriter(str(checkpoints), 0, 1, start, keep=1)
        writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(step, 1, {"norm.bias": [9]}))
        writer.wait()
    sweep(str(checkpoints), 3, start)
    assert files(checkpoints / "step-00000001") == before


def test_a_removal_that_fails_is_told_and_ends_no_training(
    s3: S3, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(bucket, step, 1, keep=1)
    s3.failing_method, s3.failure = "DELETE", "403 Forbidden"
    save(bucket, 3, 1, keep=1)
    assert list_steps(bucket) == [2, 3]
    assert f"could not remove older checkpoints from {bucket} (" in caplog.text
    assert caplog.text.rstrip().endswith("tries again at the next save")
    s3.failing_method = ""
    save(bucket, 4, 1, keep=1)
    assert list_steps(bucket) == [4]
