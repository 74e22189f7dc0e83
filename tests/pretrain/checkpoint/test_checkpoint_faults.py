"""Checkpoints under faults: all damage is found and reported, and what was committed is never lost."""

import os
import random
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_tensors import LAUNCH, RUN, flip, manifest_of, rank_file, save, whole
from tables_of_tests import Table

from multihop.common.errors import UserError
from multihop.pretrain.checkpoint.manifest import folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify import list_steps, newest_good, newest_step, verify
from multihop.pretrain.checkpoint.writer import CheckpointWriter


def test_every_flipped_byte_is_found_and_the_older_checkpoint_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    folder = Path(save(tmp_path, 2, 2))
    rng = random.Random(0)
    for path in _named_files(folder):
        original = path.read_bytes()
        for _ in range(150):
            path.write_bytes(flip(original, rng.randrange(len(original)), rng.randrange(8)))
            found, rejected = newest_good(str(tmp_path))
            assert found is not None and found.step == 1
            assert len(rejected) == 1 and path.name in rejected[0]
        path.write_bytes(original)
    found, rejected = newest_good(str(tmp_path))
    assert found is not None and found.step == 2 and not rejected


@pytest.mark.long
def test_every_bit_of_every_byte_of_a_checkpoint_is_found_when_it_flips(tmp_path: Path, table: Table) -> None:
    folder = Path(save(tmp_path, 1, 2))
    count = 0
    for path in _named_files(folder):
        original = path.read_bytes()
        for at in range(len(original)):
            for bit in range(8):
                path.write_bytes(flip(original, at, bit))
                with pytest.raises(UserError, match=path.name):
                    verify(str(folder))
            count += 1
        path.write_bytes(original)
    assert verify(str(folder)).step == 1
    table(f"{8 * count} flipped bits in {count} bytes of {len(_named_files(folder))} files, all found")


def _named_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint without the .done files, which only writers use."""
    named = sorted(path for path in folder.iterdir() if path.suffix != ".done")
    assert {path.name for path in named} == {entry.file for entry in verify(str(folder)).files} | {"manifest.json"}
    return named


def test_missing_and_shortened_files_are_named(tmp_path: Path) -> None:
    folder = Path(save(tmp_path, 1, 2))
    file = folder / rank_file(1)
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"rank-0001\..*\.safetensors is damaged: it has \d+ bytes, the manifest says"):
        verify(str(folder))
    with pytest.raises(UserError, match=r"rank-0001\..*\.safetensors cannot be read: it has \d+ bytes"):
        read_all(folder)
    file.unlink()
    with pytest.raises(UserError, match=r"rank-0001\..*\.safetensors is missing"):
        verify(str(folder))
    with pytest.raises(UserError, match=r"rank-0001\..*\.safetensors is missing"):
        read_all(folder)
    (folder / rank_file(0)).unlink()
    found, rejected = newest_good(str(tmp_path))
    assert found is None and rejected == [f"{folder / rank_file(rank)} is missing" for rank in (0, 1)]


def read_all(folder: Path) -> None:
    with CheckpointReader(str(folder)) as reader:
        list(reader.weights())


def test_a_checkpoint_without_manifest_does_not_exist_and_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    half = Path(save(tmp_path, 2, 1))
    (half / "manifest.json").unlink()
    assert newest_step(str(tmp_path)) == 1
    with pytest.raises(UserError, match="never committed"):
        read_checkpoint_manifest(str(half))
    assert sweep(str(tmp_path), 1, f"{RUN[:8]}-b") == ["removed step-00000002, which was never committed"]
    assert not half.exists() and newest_step(str(tmp_path)) == 1


def test_another_starts_leftover_is_not_taken_for_a_ranks_part(tmp_path: Path) -> None:
    folder = Path(save(tmp_path, 1, 2))
    (folder / "manifest.json").unlink()
    new = f"{RUN[:8]}-new"
    first = CheckpointWriter(str(tmp_path), 0, 2, new, 3)
    first.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(1, 2))
    waited = threading.Event()
    threading.Thread(target=lambda: (first.wait(), waited.set()), daemon=True).start()
    assert not waited.wait(0.5) and not (folder / "manifest.json").exists()
    second = CheckpointWriter(str(tmp_path), 1, 2, new, 3)
    second.save({"weight/word.weight@0": torch.zeros(35)}, manifest_of(1, 2))
    assert waited.wait(20) and verify(str(folder)).step == 1


def test_a_late_rank_of_an_earlier_start_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's node lost its connection during the save, and a later launch has committed the same step."""
    late, go_on = threading.Event(), threading.Event()
    replace = os.replace

    def held(source: Any, target: Any) -> None:
        if "-late.safetensors" in str(target):
            late.set()
            assert go_on.wait(20)
        replace(source, target)

    monkeypatch.setattr("os.replace", held)
    earlier = CheckpointWriter(str(tmp_path), 1, 3, f"{RUN[:8]}-late", 9)
    earlier.save({"weight/word.weight@9": torch.zeros(9)}, manifest_of(1, 3))
    assert late.wait(20)
    folder = save(tmp_path, 1, 2)
    go_on.set()
    earlier.wait()
    assert verify(folder).world_size == 2
    sweep(str(tmp_path), 1, f"{RUN[:8]}-b")
    assert not list(Path(folder).glob("*late*")) and verify(folder).world_size == 2


@pytest.mark.parametrize("swept", [False, True])
def test_a_late_rank_0_of_an_earlier_start_commits_nothing_over_a_commit(
    tmp_path: Path, swept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, go_on = threading.Event(), threading.Event()
    link = os.link

    def held(source: Any, target: Any) -> None:
        if "-late.tmp" in str(source):
            late.set()
            assert go_on.wait(20)
        link(source, target)

    monkeypatch.setattr("os.link", held)
    earlier = CheckpointWriter(str(tmp_path), 0, 1, f"{RUN[:8]}-late", 9)
    earlier.save({f"weight/{name}@0": tensor.view(-1) for name, tensor in whole(1).items()}, manifest_of(1, 1))
    assert late.wait(20)
    if swept:
        sweep(str(tmp_path), None, f"{RUN[:8]}-b")
    folder = save(tmp_path, 1, 2)
    before = Path(folder, "manifest.json").read_bytes()
    go_on.set()
    with suppress(OSError):  # its temporary file was swept
        earlier.wait()
    assert Path(folder, "manifest.json").read_bytes() == before and verify(folder).world_size == 2


def test_a_commit_of_an_earlier_start_under_a_save_ends_it(tmp_path: Path) -> None:
    """Ranks that begin to save after the commit write nothing, and no rank waits for them."""
    halves = [{"weight/word.weight@0": whole(1)["word.weight"].view(-1)}, {"weight/norm.bias@0": whole(1)["norm.bias"]}]
    writers = [CheckpointWriter(str(tmp_path), rank, 2, f"{RUN[:8]}-b", 9) for rank in (0, 1)]
    writers[0].save(halves[0], manifest_of(1, 2))
    while not list(tmp_path.glob(f"*/rank-0000.{RUN[:8]}-b.done")):
        time.sleep(0.01)
    folder = save(tmp_path, 1, 1)
    for writer, half in zip(writers[1:], halves[1:], strict=True):
        writer.save(half, manifest_of(1, 2))
    for writer in writers:
        writer.wait()
    assert verify(folder).world_size == 1 and not list(tmp_path.glob("*/rank-0001.*"))


def test_nothing_is_committed_whose_files_another_start_has_removed(tmp_path: Path) -> None:
    writers = [CheckpointWriter(str(tmp_path), rank, 2, LAUNCH, 9) for rank in (0, 1)]
    writers[1].save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(1, 2))
    folder = Path(folder_of_step(str(tmp_path), 1))
    while not (folder / f"rank-0001.{LAUNCH}.done").exists():
        time.sleep(0.01)
    (folder / rank_file(1)).unlink()
    writers[0].save({"weight/word.weight@0": torch.zeros(35)}, manifest_of(1, 2))
    with pytest.raises(OSError, match=rf"step 1 could not be saved .*{rank_file(1)} was removed by another"):
        writers[0].wait()
    assert not (folder / "manifest.json").exists()
    save(tmp_path, 1, 1)  # what rank 1 still waits for: its thread would keep this process alive
    writers[1].wait()


def test_ranks_that_do_not_hold_each_element_once_commit_nothing(tmp_path: Path) -> None:
    word, bias = whole(1)["word.weight"].view(-1), whole(1)["norm.bias"]
    for live, reason in [
        ({"weight/word.weight@0": word}, r"hold 0 elements of norm\.bias, its shape has 9"),
        (
            {"weight/word.weight@0": word, "weight/norm.bias@1": bias[1:]},
            r"norm\.bias up to element 0, and then from 1",
        ),
        ({"weight/word.weight@0": word, "weight/norm.bias@0": bias[1:]}, r"hold 8 elements of norm\.bias"),
        ({"weight/word.weight@0": word, "weight/norm.bias@0": bias, "weight/norm.bias@8": bias[8:]}, "up to element 9"),
        (
            {"weight/word.weight@0": word, "exp_avg/norm.bias@0": bias},
            r"the kinds of norm\.bias are not a sorted list with weight in it",
        ),
        (
            {"weight/word.weight@0": word, "weight/norm.bias@0": bias, "exp_avg/norm.bias@1": bias[1:]},
            r"the slices of exp_avg, weight of norm\.bias differ",
        ),
        ({"weight/word.weight@0": word, "weight/other@0": bias}, "other is not a parameter of the manifest"),
        ({}, "must save at least one slice"),
    ]:
        writer = CheckpointWriter(str(tmp_path), 0, 1, LAUNCH, 9)
        writer.save(live, manifest_of(1, 1))
        with pytest.raises(UserError, match=reason):
            writer.wait()
        assert newest_step(str(tmp_path)) is None


@pytest.mark.parametrize("name", ["manifest.json", rank_file(0)])
@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "folder"])
def test_what_is_no_file_is_a_sentence(tmp_path: Path, kind: str, name: str) -> None:
    save(tmp_path, 1, 1)
    folder = Path(save(tmp_path, 2, 1))
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(kind)
    found, (reason,) = newest_good(str(tmp_path))
    assert found is not None and found.step == 1
    assert f"{folder / name} is damaged: it cannot be read (" in reason
    with pytest.raises(UserError, match=re.escape(str(folder / name))):
        read_all(folder)


def test_a_failed_write_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    (tmp_path / "step-00000002").write_text("in the way")
    writer = CheckpointWriter(str(tmp_path), 0, 1, LAUNCH, 1)
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(2, 1, {"norm.bias": [9]}))
    with pytest.raises(OSError, match=r"step 2 could not be saved to .*rerun the same command"):
        writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(3, 1))
    assert verify(folder_of_step(str(tmp_path), 1)).step == 1


def test_a_bucket_that_refuses_is_an_error_that_loses_nothing(s3: Any, bucket: str) -> None:
    good = save(bucket, 1, 1)
    writer = CheckpointWriter(bucket, 0, 1, LAUNCH, 1)
    s3.failures, s3.failure = 1000, "403 Forbidden"
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(2, 1, {"norm.bias": [9]}))
    with pytest.raises(OSError, match=r"step 2 could not be saved to s3://.*rerun the same command"):
        writer.wait()
    with pytest.raises(OSError):  # and not: there is no checkpoint that verifies
        newest_good(bucket)
    s3.failures = 0
    assert newest_good(bucket)[0] == verify(good)
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(2, 1, {"norm.bias": [9]}))
    writer.wait()
    assert list_steps(bucket) == [2]


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 3 MB at `folder`."""
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "multihop-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def small_files(folder: Path) -> Iterator[None]:
    """Limit the files that this process may write to 1 MB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit", [small_disk, small_files])
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path: Path, limit: Any) -> None:
    shapes = {"a": [1_000_000]}
    with limit(tmp_path):
        good = save(tmp_path, 1, 1)
        writer = CheckpointWriter(str(tmp_path), 0, 1, LAUNCH, 1)
        writer.save({"weight/a@0": torch.zeros(1_000_000)}, manifest_of(2, 1, shapes))
        with pytest.raises(OSError, match=r"step 2 could not be saved .*(No space left|File too large)") as failed:
            writer.wait()
        assert isinstance(failed.value.__cause__, OSError)
        assert list(Path(folder_of_step(str(tmp_path), 2)).iterdir()) == []
        found, _ = newest_good(str(tmp_path))
        assert found == verify(good)
        sweep(str(tmp_path), 1, f"{RUN[:8]}-b")
        writer.save({"weight/a@0": torch.zeros(100)}, manifest_of(2, 1, {"a": [100]}))
        writer.wait()
        assert newest_step(str(tmp_path)) == 2 and list_steps(str(tmp_path)) == [2]
