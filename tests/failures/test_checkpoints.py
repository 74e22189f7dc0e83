"""Saves, resumes and removals of checkpoints, by three launches of which one fails."""

import itertools
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from simulation.bucket import SimulatedBucket
from simulation.disk import SimulatedDisk
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import World
from tables_of_tests import Table

from multihop.common import storage
from multihop.common.disk import Disk
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint import retention, writer
from multihop.pretrain.checkpoint.manifest import MANIFEST, CheckpointManifest, folder_of_step
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify import list_steps, load_weights, newest_good
from multihop.pretrain.checkpoint.writer import CheckpointWriter

_RUN = "5" * 32
_SHAPES = {"a": [6], "b": [3]}
_KEEP = 2
_LAUNCH_S = 60.0
"""Seconds after which a launch that has not ended is followed by the next one."""


def content(step: int) -> dict[str, torch.Tensor]:
    """What the checkpoint of a step holds, whoever saves it."""
    return {name: torch.arange(shape[0], dtype=torch.float32) * (step + 1) for name, shape in _SHAPES.items()}


@pytest.fixture(params=["disk", "bucket"])
def three_launches(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Each launch resumes from the newest good checkpoint, sweeps, and saves two steps on two ranks.

    Promised: what was acknowledged is there, every committed checkpoint is whole and right, and the newest two
    are kept.
    """
    worlds = itertools.count()

    def scenario(world: World) -> None:
        root = tmp_path / str(next(worlds))
        root.mkdir()
        bucket = SimulatedBucket(world)
        monkeypatch.setattr(storage, "connect", lambda *_: bucket)
        checkpoints = f"{root}/checkpoints" if request.param == "disk" else "s3://bucket/checkpoints"
        acknowledged = set[int]()

        def launch(name: str) -> None:
            def choose() -> int:
                found, _ = newest_good(checkpoints)
                step = found.step if found else 0
                sweep(checkpoints, found.step if found else None, f"{_RUN[:8]}-{name}")
                return step

            def rank(number: int, step: int) -> None:
                writer = CheckpointWriter(checkpoints, number, 2, f"{_RUN[:8]}-{name}", _KEEP)
                for each in (step + 1, step + 2):
                    halves = {key: tensor.tensor_split(2)[number] for key, tensor in content(each).items()}
                    starts = {key: number * (len(tensor) + 1 >> 1) for key, tensor in content(each).items()}
                    live = {f"weight/{key}@{starts[key]}": half for key, half in halves.items()}
                    writer.save(live, _manifest(each))
                    writer.wait()
                    acknowledged.add(each)

            chosen = world.start(f"{name}, start", choose)
            world.run(lambda: chosen.is_dead)
            if chosen.result is not None:
                for number in (0, 1):
                    world.start(f"{name}, rank {number}", lambda number=number: rank(number, chosen.result))
                deadline = world.time + _LAUNCH_S
                world.run(lambda: world.time > deadline)

        with ExitStack() as stack:
            if request.param == "disk":
                stack.enter_context(SimulatedDisk(world, root).mounted())
            for name in "abc":
                launch(name)
            world.run()
            found, rejected = newest_good(checkpoints)
            assert found is not None and all("never committed" in each for each in rejected), rejected
            assert found.step >= max(acknowledged), (
                f"step {found.step} is the newest, {max(acknowledged)} was acknowledged"
            )
            kept = range(found.step - _KEEP + 1, found.step + 1)
            folders = {step: open_folder(folder_of_step(checkpoints, step)) for step in list_steps(checkpoints)}
            committed = [step for step, folder in folders.items() if MANIFEST in folder.names()]
            assert set(kept) <= set(committed), f"{committed} are left of {list(kept)}"
            for step in committed:
                weights = load_weights(folder_of_step(checkpoints, step))
                assert all(torch.equal(weights[key], tensor) for key, tensor in content(step).items()), step

    return scenario


def _manifest(step: int) -> CheckpointManifest:
    counts = dict.fromkeys(("step", "tokens", "updates"), step)
    return CheckpointManifest(
        run=_RUN, **counts, world_size=2, zero_stage=1, parameters=_SHAPES, data_fingerprint="fingerprint"
    )


@pytest.mark.parametrize(("every", "seed"), every_and_seed(41))
def test_saves_that_fail_anywhere(three_launches: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(three_launches, every, table, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("three_launches", ["disk"], indirect=True)
def test_a_manifest_outlives_its_files_if_its_removal_is_not_synced(
    three_launches: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Disk, "sync", lambda disk, folder: None)
    with pytest.raises(AssertionError, match=r"kind='torn'\).*safetensors is missing"):
        check_every_failure(three_launches, 1, table, kinds=("torn",))


@pytest.mark.long
@pytest.mark.parametrize("three_launches", ["disk"], indirect=True)
def test_the_newest_checkpoint_is_lost_if_the_oldest_are_kept(
    three_launches: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without a fault."""
    monkeypatch.setattr(retention, "reversed", list, raising=False)
    with pytest.raises(AssertionError, match=r"step 2 is the newest, 3 was acknowledged"):
        check_every_failure(three_launches, 1, table, kinds=())


@pytest.mark.long
@pytest.mark.parametrize("three_launches", ["disk"], indirect=True)
def test_a_manifest_outlives_its_files_if_they_are_removed_first(
    three_launches: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def files_first(checkpoints: str, keep: int, *_: object) -> list[str]:
        folders = [open_folder(folder_of_step(checkpoints, step)) for step in sorted(list_steps(checkpoints))]
        for folder in [folder for folder in folders if MANIFEST in folder.names()][:-keep]:
            for name in sorted(folder.names(), key=lambda name: name == MANIFEST):
                folder.remove(name)
            folder.remove_if_empty()
        return []

    monkeypatch.setattr(writer, "remove_old", files_first)
    with pytest.raises(AssertionError, match=r"kind='kill'\).*safetensors is missing"):
        check_every_failure(three_launches, 1, table, kinds=("kill",))


@pytest.mark.parametrize("three_launches", ["disk"], indirect=True)
def test_the_same_seed_is_the_same_sequence_of_operations(three_launches: Scenario) -> None:
    worlds = []
    for seed in (1, 1, 2):
        with World(seed) as world:
            three_launches(world)
        worlds.append(world)
    # Names of temporary files are random.
    first, again, other = ([(time, name, what.split()[0]) for time, name, what in world.history] for world in worlds)
    assert first == again != other
