"""Checkpoints that are whole or absent, and readable by any number of ranks."""

import json
import resource
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from saved_tensors import LAUNCH, RUN, as_given, flip, manifest_of, rank_file, rewrite_manifest, save, whole, write

from multihop.common.errors import UserError
from multihop.common.files import canonical_json, sha256_json
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.manifest import folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify import list_steps, load_weights, newest_good, newest_step, verify
from multihop.pretrain.checkpoint.writer import CheckpointWriter


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_was_saved_by_any_number_of_ranks_is_read_whole_and_in_slices(tmp_path: Path, world_size: int) -> None:
    folder = save(tmp_path, 3, world_size)
    saved = verify(folder)
    assert as_given(saved) == manifest_of(3, world_size)
    for name, tensor in load_weights(folder).items():
        assert torch.equal(tensor, whole(3)[name])
    with CheckpointReader(folder) as reader:
        for start, numel in [(0, 35), (11, 20), (34, 1)]:
            found = reader.read("weight", "word.weight", start, numel)
            assert torch.equal(found, whole(3)["word.weight"].view(-1)[start : start + numel])
        with pytest.raises(UserError, match=r"holds 1 of 5 elements of weight/norm\.bias"):
            reader.read("weight", "norm.bias", 8, 5)
        with pytest.raises(UserError, match=r"holds 0 of 5 elements of exp_avg/norm\.bias"):
            reader.read("exp_avg", "norm.bias", 0, 5)


def test_a_checkpoints_whole_life(location: str) -> None:
    for step in (1, 2, 3):
        save(location, step, 2)
    folder = save(location, 4, 2, keep=2, keep_every=3)
    assert list_steps(location) == [3, 4] and newest_step(location) == 4 and verify(folder).world_size == 2
    save(location, 5, 2, keep=2, keep_every=3)
    save(location, 6, 2, keep=1, keep_every=3, needed=lambda: {4})
    assert list_steps(location) == [3, 4, 6]
    save(location, 6, 2, keep=1, keep_every=3)
    assert list_steps(location) == [3, 6]
    last = folder_of_step(location, 6)
    with CheckpointReader(last) as reader:
        assert torch.equal(reader.read("weight", "word.weight", 9, 17), whole(6)["word.weight"].view(-1)[9:26])
    for name, tensor in load_weights(last).items():
        assert torch.equal(tensor, whole(6)[name])

    half = open_folder(save(location, 8, 2))
    half.remove("manifest.json")
    damaged = open_folder(save(location, 7, 2))
    file = damaged.read_bytes(rank_file(1))
    damaged.write_atomically(rank_file(1), flip(file, 200, 3))
    found, rejected = newest_good(location)
    assert found is not None and found.step == 6
    assert [sentence.partition(" ")[2] for sentence in rejected] == [
        "was never committed: it has no manifest.json",
        "is damaged: its SHA-256 is not the manifest's",
    ]
    assert sweep(location, found.step, f"{RUN[:8]}-b") == [
        "renamed step-00000007, which does not verify, to step-00000007.damaged-b",
        "removed step-00000008, which was never committed",
    ]
    assert list_steps(location) == [3, 6] and newest_good(location) == (verify(last), [])
    aside = open_folder(f"{location}/step-00000007.damaged-b")
    assert aside.read_bytes(rank_file(0)) and "manifest.json" in aside.names()


KINDS = ("weight", "exp_avg", "exp_avg_sq")
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
    """Resharding is reading: every slice is read as it was written, however the ranks divided the tensors."""
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


@pytest.mark.parametrize("version", [3, 4])
def test_only_the_files_and_bytes_of_the_wanted_slices_are_read(location: str, version: int) -> None:
    """Each of 4 ranks reads its quarter of every tensor from 2 ranks' files; version 3 needs all headers as well."""
    shapes = {"a": [1000, 16], "b": [333], "c": [5, 5, 5]}
    numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    truth = {(kind, name): torch.randn(numels[name]) for kind in KINDS for name in shapes}
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    for (kind, name), tensor in truth.items():
        middle = tensor.numel() // 2
        halves[0][f"{kind}/{name}@0"], halves[1][f"{kind}/{name}@{middle}"] = tensor[:middle], tensor[middle:]
    folder = write(location, halves, manifest_of(1, 2, shapes))
    headers = 0
    if version == 3:
        files = map(rank_file, (0, 1))
        headers = sum(8 + struct.unpack("<Q", open_folder(folder).read_bytes(file)[:8])[0] for file in files)
        manifest = json.loads(open_folder(folder).read_bytes("manifest.json"))
        content = {key: value for key, value in manifest.items() if key not in ("kinds", "stripes", "sha256")}
        content["format_version"] = 3
        data = canonical_json({**content, "sha256": sha256_json(content)})
        open_folder(folder).write_atomically("manifest.json", data)
    for rank in range(4):
        with CheckpointReader(folder) as reader:
            assert (reader.files_opened, reader.bytes_read) == ((2, headers) if version == 3 else (0, 0))
            mine = 0
            for (kind, name), tensor in truth.items():
                start, stop = (tensor.numel() * r // 4 for r in (rank, rank + 1))
                assert torch.equal(reader.read(kind, name, start, stop - start), tensor[start:stop])
                mine += stop - start
            assert reader.bytes_read == headers + 4 * mine
            assert reader.files_opened == (2 if version == 3 else 1)


CUTS = st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=8), max_size=4)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS, striped=st.tuples(st.integers(1, 40), st.integers(1, 9)), data=st.data())
def test_any_slice_is_read_from_the_files_that_hold_it_and_no_others(
    tmp_path_factory: pytest.TempPathFactory, cuts: Any, striped: tuple[int, int], data: st.DataObject
) -> None:
    """Tensors are cut at random over random ranks, and one parameter into equal parts as ZeRO-3 does."""
    numel, part = striped
    cuts = [*cuts, [(min(part, numel - start), start // part % 4) for start in range(0, numel, part)]]
    parts: list[dict[str, torch.Tensor]] = [{}, {}, {}, {}]
    truth: dict[str, torch.Tensor] = {}
    owner: dict[str, list[int]] = {}
    for number, slices in enumerate(cuts):
        name, start = f"p{number}", 0
        owner[name] = [rank for elements, rank in slices for _ in range(elements)]
        truth[name] = torch.randn(len(owner[name]))
        for elements, rank in slices:
            for kind, factor in (("weight", 1), ("exp_avg", 2)):
                parts[rank][f"{kind}/{name}@{start}"] = factor * truth[name][start : start + elements]
            start += elements
    shapes = {name: [len(tensor)] for name, tensor in truth.items()}
    folder = write(str(tmp_path_factory.mktemp("cuts")), parts, manifest_of(1, 4, shapes))
    assert verify(folder).world_size == 4
    name = data.draw(st.sampled_from(sorted(truth)))
    start = data.draw(st.integers(0, len(truth[name]) - 1))
    stop = data.draw(st.integers(start, len(truth[name])))
    with CheckpointReader(folder) as reader:
        for kind, factor in (("weight", 1), ("exp_avg", 2)):
            assert torch.equal(reader.read(kind, name, start, stop - start), factor * truth[name][start:stop])
        assert reader.files_opened == len(set(owner[name][start:stop]))
        assert reader.bytes_read == 8 * (stop - start)
    with CheckpointReader(folder) as reader:
        assert all(torch.equal(tensor, truth[name]) for name, tensor in reader.weights())


def test_the_manifest_of_many_ranks_is_small(tmp_path: Path) -> None:
    """With ZeRO-3, each of 200 ranks has a slice of each parameter, and all slices are two stripes."""
    shapes = {f"p{number}": [1000 * number + 7] for number in range(1, 9)}
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(200)]
    for name, (numel,) in shapes.items():
        part = -(-numel // 200)
        for rank, start in enumerate(range(0, numel, part)):
            parts[rank][f"weight/{name}@{start}"] = torch.full((min(part, numel - start),), float(rank))
    folder = write(str(tmp_path), parts, manifest_of(1, 200, shapes))
    stripes = verify(folder).stripes
    assert stripes is not None and max(map(len, stripes.values())) <= 2
    with CheckpointReader(folder) as reader:
        assert reader.read("weight", "p8", 41 * 77, 41).eq(77).all() and reader.files_opened == 1


def test_a_checkpoint_of_more_files_than_may_be_open_is_read(tmp_path: Path) -> None:
    ranks = 300
    parts = [{f"weight/a@{rank}": torch.tensor([float(rank)])} for rank in range(ranks)]
    folder = write(str(tmp_path), parts, manifest_of(1, ranks, {"a": [ranks]}))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 280, limits[1]))
    try:
        assert torch.equal(load_weights(folder)["a"], torch.arange(float(ranks)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_file_is_as_large_as_its_numbers_and_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    """Weights and two moments take 12 bytes per parameter; the header of this model takes a thousandth of that."""
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
    """Other types of numbers are saved as fp32, and the buffer is reused."""
    writer = CheckpointWriter(str(tmp_path), 0, 1, LAUNCH, 9)
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
    first, second = (CheckpointWriter(str(tmp_path), rank, 2, LAUNCH, 3) for rank in (0, 1))
    second.save({"weight/word.weight@0": torch.zeros(35)}, manifest_of(1, 2))
    began = threading.Event()

    def again() -> None:
        second.save({"weight/word.weight@0": torch.ones(35)}, manifest_of(2, 2))
        began.set()

    threading.Thread(target=again, daemon=True).start()
    assert not began.wait(0.5) and (tmp_path / "step-00000001" / f"rank-0001.{LAUNCH}.done").exists()
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


@pytest.mark.parametrize("version", [1, 99])
def test_an_unknown_format_version_is_refused(tmp_path: Path, version: int) -> None:
    folder = save(tmp_path, 7, 1)
    rewrite_manifest(folder, format_version=version)
    with pytest.raises(UserError, match=rf"manifest\.json has format version {version}, supported are 2 to 5"):
        read_checkpoint_manifest(folder)
