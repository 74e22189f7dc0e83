"""Checkpoints that can be trusted: whole or absent, every byte accounted for, readable by any number of ranks."""

import random
import threading
from pathlib import Path

import pytest
import torch

from pretrain.checkpoint import (
    CheckpointManifest,
    CheckpointReader,
    folder_of_step,
    load_weights,
    newest_good,
    newest_step,
    read_manifest,
    verify,
)
from pretrain.checkpoint_writer import CheckpointWriter, sweep

SHAPES = {"word.weight": [7, 5], "norm.bias": [9]}


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def manifest_of(step: int, world_size: int) -> CheckpointManifest:
    return CheckpointManifest(
        step=step,
        tokens=10 * step,
        updates=step,
        world_size=world_size,
        zero_stage=1,
        parameters=SHAPES,
        files=[],
        recipe_fingerprint="r",
        data_fingerprint="d",
    )


def save(checkpoints: Path, step: int, world_size: int, keep: int = 9) -> Path:
    """As `world_size` ranks would: each owns an equal run of every parameter."""
    writers = [CheckpointWriter(checkpoints, rank, world_size, "a", keep) for rank in range(world_size)]
    for rank, writer in enumerate(writers):
        tensors = {}
        for name, tensor in whole(step).items():
            start, stop = (tensor.numel() * r // world_size for r in (rank, rank + 1))
            tensors[f"weight/{name}@{start}"] = tensor.view(-1)[start:stop].clone()
        writer.save(tensors, manifest_of(step, world_size))
    for writer in reversed(writers):
        writer.wait()
    return folder_of_step(checkpoints, step)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_was_saved_by_any_number_of_ranks_is_read_whole_and_in_slices(tmp_path: Path, world_size: int) -> None:
    folder = save(tmp_path, 3, world_size)
    assert verify(folder).step == 3
    for name, tensor in load_weights(folder).items():
        assert torch.equal(tensor, whole(3)[name])
    with CheckpointReader(folder) as reader:
        for start, numel in [(0, 35), (11, 20), (34, 1)]:
            found = reader.read("weight", "word.weight", start, numel)
            assert torch.equal(found, whole(3)["word.weight"].view(-1)[start : start + numel])
        with pytest.raises(ValueError, match=r"holds 1 of 5 elements of weight/norm\.bias"):
            reader.read("weight", "norm.bias", 8, 5)


def test_every_flipped_byte_is_found_and_the_older_checkpoint_is_taken(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    folder = save(tmp_path, 2, 2)
    rng = random.Random(0)
    for path in sorted(folder.iterdir()):
        if path.suffix == ".done":
            continue  # only the writers read those
        original = path.read_bytes()
        for _ in range(60):
            flipped = bytearray(original)
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            path.write_bytes(flipped)
            found, passed_over = newest_good(tmp_path)
            assert found is not None and found.step == 1
            assert len(passed_over) == 1 and folder.name in passed_over[0]
        path.write_bytes(original)
    found, passed_over = newest_good(tmp_path)
    assert found is not None and found.step == 2 and not passed_over


def test_a_checkpoint_without_manifest_does_not_exist_and_is_swept(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    half = save(tmp_path, 2, 1)
    (half / "manifest.json").unlink()
    assert newest_step(tmp_path) == 1
    with pytest.raises(ValueError, match="never committed"):
        read_manifest(half)
    assert sweep(tmp_path, 1, "b") == ["removed step-00000002, which was never committed"]
    assert not half.exists() and newest_step(tmp_path) == 1


def test_a_damaged_checkpoint_is_kept_for_a_person_under_another_name(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    damaged = save(tmp_path, 2, 1)
    (damaged / "rank-0000.safetensors").write_bytes(b"")
    found, _ = newest_good(tmp_path)
    assert found is not None
    sweep(tmp_path, found.step, "b")
    assert (tmp_path / "step-00000002.damaged-b").exists() and newest_step(tmp_path) == 1


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, 1, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000005"]


def test_another_starts_leftover_is_not_taken_for_a_ranks_part(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    folder = folder_of_step(tmp_path, 1)
    (folder / "manifest.json").unlink()
    first = CheckpointWriter(tmp_path, 0, 2, "new", 3)
    first.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(1, 2))
    waited = threading.Event()
    threading.Thread(target=lambda: (first.wait(), waited.set()), daemon=True).start()
    assert not waited.wait(0.5) and not (folder / "manifest.json").exists()
    second = CheckpointWriter(tmp_path, 1, 2, "new", 3)
    second.save({"weight/word.weight@0": torch.zeros(35)}, manifest_of(1, 2))
    assert waited.wait(20) and verify(folder).step == 1


def test_a_failed_write_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)
    folder_of_step(tmp_path, 2).write_text("in the way")
    writer = CheckpointWriter(tmp_path, 0, 1, "a", 1)
    writer.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(2, 1))
    with pytest.raises(OSError):
        writer.wait()
    assert verify(folder_of_step(tmp_path, 1)).step == 1
