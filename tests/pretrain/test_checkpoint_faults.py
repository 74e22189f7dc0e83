"""Checkpoints under faults: every damage is found and named, and what was committed is never lost."""

import json
import os
import random
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_tensors import RUN, START, flip, manifest_of, rank_file, rewrite_manifest, save

from pretrain.checkpoint import (
    CheckpointReader,
    folder_of_step,
    list_steps,
    newest_good,
    newest_step,
    read_manifest,
    verify,
)
from pretrain.checkpoint_writer import CheckpointWriter
from pretrain.retention import sweep


def test_every_flipped_byte_is_found_and_the_older_checkpoint_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    folder = Path(save(tmp_path, 2, 2))
    rng = random.Random(0)
    for path in _named_files(folder):
        original = path.read_bytes()
        for _ in range(150):
            path.write_bytes(flip(original, rng.randrange(len(original)), rng.randrange(8)))
            found, passed_over = newest_good(str(tmp_path))
            assert found is not None and found.step == 1
            assert len(passed_over) == 1 and path.name in passed_over[0]
        path.write_bytes(original)
    found, passed_over = newest_good(str(tmp_path))
    assert found is not None and found.step == 2 and not passed_over


@pytest.mark.long
def test_every_bit_of_every_byte_of_a_checkpoint_is_found_when_it_flips(tmp_path: Path) -> None:
    folder = Path(save(tmp_path, 1, 2))
    count = 0
    for path in _named_files(folder):
        original = path.read_bytes()
        for at in range(len(original)):
            for bit in range(8):
                path.write_bytes(flip(original, at, bit))
                with pytest.raises(ValueError, match=path.name):
                    verify(str(folder))
            count += 1
        path.write_bytes(original)
    assert verify(str(folder)).step == 1
    print(f"{8 * count} flipped bits in {count} bytes of {len(_named_files(folder))} files, all found")


def _named_files(folder: Path) -> list[Path]:
    """The .done files are only for the writers, while they write."""
    named = sorted(path for path in folder.iterdir() if path.suffix != ".done")
    assert {path.name for path in named} == {entry.file for entry in verify(str(folder)).files} | {"manifest.json"}
    return named


def test_missing_and_shortened_files_are_named(tmp_path: Path) -> None:
    folder = Path(save(tmp_path, 1, 2))
    file = folder / rank_file(1)
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    with pytest.raises(ValueError, match=r"rank-0001\..*\.safetensors is damaged: it has \d+ bytes, the manifest says"):
        verify(str(folder))
    with pytest.raises(ValueError, match=r"rank-0001\..*\.safetensors cannot be read: it has \d+ bytes"):
        CheckpointReader(str(folder)).__enter__()
    file.unlink()
    with pytest.raises(ValueError, match=r"rank-0001\..*\.safetensors is missing"):
        verify(str(folder))
    with pytest.raises(ValueError, match=r"rank-0001\..*\.safetensors is missing"):
        CheckpointReader(str(folder)).__enter__()


def test_a_checkpoint_without_manifest_does_not_exist_and_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    half = Path(save(tmp_path, 2, 1))
    (half / "manifest.json").unlink()
    assert newest_step(str(tmp_path)) == 1
    with pytest.raises(ValueError, match="never committed"):
        read_manifest(str(half))
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


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    folder = Path(save(tmp_path, 1, 1))
    (entry,) = json.loads((folder / "manifest.json").read_bytes())["files"]
    rewrite_manifest(folder, files=[{**entry, "file": "../secret"}])
    with pytest.raises(ValueError, match=r"no manifest of format version 3 \(files\.0\.file"):
        read_manifest(str(folder))


def test_a_failed_write_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    (tmp_path / "step-00000002").write_text("in the way")
    writer = CheckpointWriter(str(tmp_path), 0, 1, START, 1)
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(2, 1, {"norm.bias": [9]}))
    with pytest.raises(OSError, match=r"step 2 could not be saved to .*start again"):
        writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(3, 1))
    assert verify(folder_of_step(str(tmp_path), 1)).step == 1


def test_a_bucket_that_refuses_is_an_error_that_loses_nothing(s3: Any, bucket: str) -> None:
    good = save(bucket, 1, 1)
    writer = CheckpointWriter(bucket, 0, 1, START, 1)
    s3.failures, s3.failure = 1000, "403 Forbidden"
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(2, 1, {"norm.bias": [9]}))
    with pytest.raises(OSError, match=r"step 2 could not be saved to s3://.*start again"):
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
    """A file system of 3 MB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "multihop-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def small_files(folder: Path) -> Iterator[None]:
    """Nobody in this process may write a file of over 1 MB."""
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
        writer = CheckpointWriter(str(tmp_path), 0, 1, START, 1)
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
