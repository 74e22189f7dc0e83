"""Checkpoints that are whole or absent, and readable by any number of ranks."""

import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from saved_tensors import RUN, SHAPES, START, flip, manifest_of, rank_file, save, whole, write

from data_prep.files import canonical_json, sha256_file, sha256_json
from pretrain.checkpoint import (
    CheckpointReader,
    folder_of_step,
    list_steps,
    load_weights,
    newest_good,
    newest_step,
    read_manifest,
    verify,
)
from pretrain.checkpoint_writer import CheckpointWriter
from pretrain.retention import sweep
from pretrain.storage import open_folder


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_was_saved_by_any_number_of_ranks_is_read_whole_and_in_slices(tmp_path: Path, world_size: int) -> None:
    folder = save(tmp_path, 3, world_size)
    saved = verify(folder)
    assert saved.model_copy(update={"files": [], "sha256": ""}) == manifest_of(3, world_size)
    for name, tensor in load_weights(folder).items():
        assert torch.equal(tensor, whole(3)[name])
    with CheckpointReader(folder) as reader:
        for start, numel in [(0, 35), (11, 20), (34, 1)]:
            found = reader.read("weight", "word.weight", start, numel)
            assert torch.equal(found, whole(3)["word.weight"].view(-1)[start : start + numel])
        with pytest.raises(ValueError, match=r"holds 1 of 5 elements of weight/norm\.bias"):
            reader.read("weight", "norm.bias", 8, 5)
        with pytest.raises(ValueError, match=r"holds 0 of 5 elements of exp_avg/norm\.bias"):
            reader.read("exp_avg", "norm.bias", 0, 5)


def test_a_checkpoints_whole_life(place: str) -> None:
    """On a disk and in a bucket."""
    for step in (1, 2, 3):
        save(place, step, 2)
    folder = save(place, 4, 2, keep=2, keep_every=3)
    assert list_steps(place) == [3, 4] and newest_step(place) == 4 and verify(folder).world_size == 2
    save(place, 5, 2, keep=2, keep_every=3)
    save(place, 6, 2, keep=1, keep_every=3)
    assert list_steps(place) == [3, 6]
    last = folder_of_step(place, 6)
    with CheckpointReader(last) as reader:
        assert torch.equal(reader.read("weight", "word.weight", 9, 17), whole(6)["word.weight"].view(-1)[9:26])
    for name, tensor in load_weights(last).items():
        assert torch.equal(tensor, whole(6)[name])

    half = open_folder(save(place, 8, 2))
    half.remove("manifest.json")
    damaged = open_folder(save(place, 7, 2))
    file = damaged.read_bytes(rank_file(1))
    damaged.write_atomically(rank_file(1), flip(file, 200, 3))
    found, passed_over = newest_good(place)
    assert found is not None and found.step == 6
    assert [sentence.partition(" ")[2] for sentence in passed_over] == [
        "was never committed: it has no manifest.json",
        "is damaged: its SHA-256 is not the manifest's",
    ]
    assert sweep(place, found.step, f"{RUN[:8]}-b") == [
        "renamed step-00000007, which does not verify, to step-00000007.damaged-b",
        "removed step-00000008, which was never committed",
    ]
    assert list_steps(place) == [3, 6] and newest_good(place) == (verify(last), [])
    aside = open_folder(f"{place}/step-00000007.damaged-b")
    assert aside.read_bytes(rank_file(0)) and "manifest.json" in aside.names()


PART = st.tuples(st.integers(1, 60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=5))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    world_size=st.integers(1, 4),
    parameters=st.lists(PART, min_size=1, max_size=4),
    wanted=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(0, 60)), max_size=8),
)
def test_any_split_is_read_back_in_any_slices(
    tmp_path_factory: pytest.TempPathFactory, world_size: int, parameters: Any, wanted: Any
) -> None:
    """Resharding is reading: whoever wrote which pieces, every slice is what was written."""
    truth = {f"p{i}": torch.randn(numel) for i, (numel, _) in enumerate(parameters)}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world_size)]
    for (name, tensor), (numel, cuts) in zip(truth.items(), parameters, strict=True):
        owners = dict(sorted((cut % numel, owner % world_size) for cut, owner in cuts)) | {0: 0}
        starts = sorted(owners)
        for start, stop in zip(starts, [*starts[1:], numel], strict=True):
            parts[owners[start]][f"weight/{name}@{start}"] = tensor[start:stop]
    shapes = {name: [tensor.numel()] for name, tensor in truth.items()}
    folder = write(str(tmp_path_factory.mktemp("split")), parts, manifest_of(1, world_size, shapes))
    assert verify(folder).world_size == world_size
    with CheckpointReader(folder) as reader:
        for name, tensor in truth.items():
            assert torch.equal(reader.read("weight", name, 0, tensor.numel()), tensor)
        for which, start, numel in wanted:
            name = f"p{which % len(truth)}"
            start %= truth[name].numel()
            numel = min(numel, truth[name].numel() - start)
            assert torch.equal(reader.read("weight", name, start, numel), truth[name][start : start + numel])


def test_only_the_bytes_of_the_wanted_slices_are_read(place: str) -> None:
    """From 2 ranks to 4: each reads its quarter of every tensor, and the headers."""
    shapes = {"a": [1000, 16], "b": [333], "c": [5, 5, 5]}
    truth = {
        (kind, name): torch.randn(torch.Size(shape).numel())
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name, shape in shapes.items()
    }
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for (kind, name), tensor in truth.items():
        middle = tensor.numel() // 2
        halves[0][f"{kind}/{name}@0"], halves[1][f"{kind}/{name}@{middle}"] = tensor[:middle], tensor[middle:]
    folder = write(place, halves, manifest_of(1, 2, shapes))
    headers = sum(8 + struct.unpack("<Q", open_folder(folder).read_bytes(rank_file(rank))[:8])[0] for rank in (0, 1))
    elements = 0
    for rank in range(4):
        with CheckpointReader(folder) as reader:
            assert reader.bytes_read == headers
            mine = 0
            for (kind, name), tensor in truth.items():
                start, stop = (tensor.numel() * r // 4 for r in (rank, rank + 1))
                assert torch.equal(reader.read(kind, name, start, stop - start), tensor[start:stop])
                mine += stop - start
            assert reader.bytes_read == headers + 4 * mine
            elements += mine
    assert elements == sum(tensor.numel() for tensor in truth.values())


def test_a_file_is_as_large_as_its_numbers_and_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    """12 bytes a parameter for weights and two moments; of one size of model, the header is 1 in a thousand."""
    shapes = {f"encoder.layer.{i}.attention.output.dense.weight": [64, 300] for i in range(40)}
    live = {
        f"{kind}/{name}@0": torch.randn(64 * 300) for name in shapes for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    folder = write(str(tmp_path), [live], manifest_of(1, 1, shapes))
    parameters = 40 * 64 * 300
    assert 12 * parameters < verify(folder).files[0].bytes < 12 * parameters * 1.002
    read = load_file(Path(folder, rank_file(0)))
    assert read.keys() == live.keys() and all(torch.equal(read[key], live[key]) for key in live)


def test_what_changes_after_save_is_not_saved(tmp_path: Path) -> None:
    """And other types of numbers are saved as fp32; the buffer is used again."""
    writer = CheckpointWriter(str(tmp_path), 0, 1, START, 9)
    shapes = {"a": [50_000], "b": [3]}
    for step in (1, 2):
        live = {"weight/a@0": torch.full((50_000,), float(step)), "weight/b@0": torch.arange(3, dtype=torch.bfloat16)}
        writer.prepare(live)
        writer.save(live, manifest_of(step, 1, shapes))
        live["weight/a@0"].zero_()
    other = {"weight/a@0": torch.ones(50_001)}
    writer.save(other, manifest_of(3, 1, {"a": [50_001]}))
    writer.wait()
    for step in (1, 2):
        weights = load_weights(folder_of_step(str(tmp_path), step))
        assert torch.equal(weights["a"], torch.full((50_000,), float(step)))
        assert torch.equal(weights["b"], torch.arange(3.0))
    assert load_weights(folder_of_step(str(tmp_path), 3))["a"].sum() == 50_001


def test_no_rank_begins_a_save_before_the_one_before_is_committed(tmp_path: Path) -> None:
    first, second = (CheckpointWriter(str(tmp_path), rank, 2, START, 3) for rank in (0, 1))
    second.save({"weight/word.weight@0": torch.zeros(35)}, manifest_of(1, 2))
    began = threading.Event()

    def again() -> None:
        second.save({"weight/word.weight@0": torch.ones(35)}, manifest_of(2, 2))
        began.set()

    threading.Thread(target=again, daemon=True).start()
    assert not began.wait(0.5) and (tmp_path / "step-00000001" / f"rank-0001.{START}.done").exists()
    assert list_steps(str(tmp_path)) == [1]
    for step in (1, 2):
        first.save({"weight/norm.bias@0": torch.zeros(9)}, manifest_of(step, 2))
    assert began.wait(20)
    first.wait()
    second.wait()
    assert second.last_wait_s >= 0.5
    for step in (1, 2):
        assert load_weights(folder_of_step(str(tmp_path), step))["word.weight"].sum() == 35 * (step - 1)


def test_what_is_committed_is_never_written_over(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2)
    before = verify(folder)
    write(str(tmp_path), [{"weight/norm.bias@0": torch.zeros(9)}], manifest_of(1, 1))
    assert verify(folder) == before


def version_1(checkpoints: Path, step: int) -> Path:
    """As the first release wrote them."""
    folder = checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    file = folder / "rank-0000.safetensors"
    save_file({f"weight/{name}@0": tensor.flatten() for name, tensor in whole(step).items()}, file)
    manifest = {
        "format_version": 1,
        "step": step,
        "tokens": 70,
        "updates": 6,
        "world_size": 1,
        "zero_stage": 1,
        "parameters": SHAPES,
        "files": [{"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_file(file)}],
        "recipe_fingerprint": "r",
        "data_fingerprint": "d",
        "mlflow_run_id": None,
    }
    (folder / "manifest.json").write_bytes(canonical_json({**manifest, "sha256": sha256_json(manifest)}))
    return folder


def test_the_first_format_version_is_read(tmp_path: Path) -> None:
    folder = version_1(tmp_path, 7)
    saved = verify(str(folder))
    assert (saved.format_version, saved.run, saved.step, saved.tokens, saved.updates) == (3, None, 7, 70, 6)
    assert (saved.recipe, saved.skipped, saved.skipped_in_a_row, saved.counters, saved.parent) == (None, 0, 0, {}, None)
    for name, tensor in load_weights(str(folder)).items():
        assert torch.equal(tensor, whole(7)[name])
    save(tmp_path, 8, 1)
    assert newest_step(str(tmp_path)) == 8
    changed = json.loads((folder / "manifest.json").read_bytes()) | {"recipe_fingerprint": "s"}
    (folder / "manifest.json").write_bytes(canonical_json(changed))
    with pytest.raises(ValueError, match="its own hash does not match"):
        read_manifest(str(folder))


def test_an_unknown_format_version_is_refused(tmp_path: Path) -> None:
    folder = version_1(tmp_path, 7)
    content = {"format_version": 99, "everything": "else"}
    (folder / "manifest.json").write_bytes(canonical_json({**content, "sha256": sha256_json(content)}))
    with pytest.raises(ValueError, match=r"manifest\.json is of format version 99, known are 1 to 3"):
        read_manifest(str(folder))
