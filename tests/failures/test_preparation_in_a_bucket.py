"""Nodes that share only a bucket, and prepare the data of their runs through it."""

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prepared_data import bytes_of
from simulation.bucket import SimulatedBucket
from simulation.every_failure import Scenario, check_every_failure, every_and_seed
from simulation.world import Process, World
from tables_of_tests import Table

from multihop.cluster.locks import InUseError
from multihop.cluster.remote import node_cache, remote_run
from multihop.cluster.remote.remote_run import RemoteRun
from multihop.cluster.runs import prepared
from multihop.cluster.runs.prepared import get_or_prepare_dataset, work_of
from multihop.common import cache, clock, mirror, storage
from multihop.common.files import canonical_json, sha256_json
from multihop.common.storage import Folder, open_folder
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.pipeline.identity import resolve_known_inputs
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import list_files
from multihop.data_prep.stages import object_store
from multihop.data_prep.stages.runner import no_report

_RUNS = "s3://bucket/runs"


@pytest.fixture
def three_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """Each node prepares the same data set, or fetches it if another one has prepared it, and tries again after an
    error. The stages run in the process of their caller instead of on Ray.

    Promised: each folder in the bucket that has a listing is whole, at any time; a node that was told that the data are
    prepared has the bytes of a preparation without a fault, and so has a node that fetches them later.
    """
    texts = tmp_path / "texts.jsonl"
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 5))) for _ in range(200)]
    rows = [" ".join(rng.choices(words, k=30)) + "." for _ in range(40)]
    texts.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    data = DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.2)
    tokenizer = TokenizerConfig(vocab_size=80, threads=1)
    prepare(data, tokenizer, tmp_path / "expected")
    expected = bytes_of(tmp_path / "expected")
    worlds = itertools.count()

    def in_process(function: Callable[[Any], Any], items: Sequence[Any], **_: object) -> Iterable[Any]:
        return map(function, items)

    def scenario(world: World) -> None:
        bucket, disks = SimulatedBucket(world), tmp_path / str(next(worlds))

        def cache_folder(*parts: str) -> Path:
            process = world.process()
            assert process is not None
            return disks.joinpath(process.name, *parts)

        monkeypatch.setattr(storage, "connect", lambda *_: bucket)
        for module in (cache, node_cache, object_store):
            monkeypatch.setattr(module, "cache_folder", cache_folder)
        monkeypatch.setattr(remote_run, "_exit_after_loss", lambda _: world.kill())
        monkeypatch.setattr(prepared, "map_on_ray", in_process)

        def node() -> Path:
            for _ in range(20):
                try:
                    remote = RemoteRun(_RUNS, "run")
                    store, files = remote.runs / ".prepared" / "sources", list_files(data.sources)
                    inputs = resolve_known_inputs(data, tokenizer, files, work_of(store))
                    return get_or_prepare_dataset(
                        data, tokenizer, files, inputs, store, remote.folder / "data", no_report, remote=remote
                    )[0]
                except (InUseError, OSError):
                    clock.sleep(5.0)
            raise RuntimeError("twenty attempts have failed")

        def check(process: Process) -> None:
            _check_folders(bucket)
            if process.error is None:
                found = bytes_of(process.result)
                assert expected.items() <= found.items()  # a fetched copy has records of its own too

        # The second begins when the first has ended or stands still, so that both do not compute at once: that made
        # the order of their operations depend on the machine's load.
        first = world.start("first", node)
        world.run(until=lambda: first.is_dead or world.stands_still(first))
        _check_folders(bucket)
        for name in ("second", "third"):
            process = world.start(name, node)
            world.run()
            check(process)
        check(first)
        assert process.error is None or (world.fault is not None and world.fault.process == process.name), process.error

    return scenario


def _check_folders(bucket: SimulatedBucket) -> None:
    """Check each folder of the bucket that has a listing."""
    for path in sorted(bucket.objects):
        folder, _, name = path.rpartition("/")
        if name == mirror.LISTING:
            remote = open_folder(f"s3://{folder}")
            for file, entry in mirror.read_listing(remote).items():
                assert entry["sha256"] == hashlib.sha256(bucket.objects[f"{folder}/{file}"]).hexdigest()


@pytest.mark.parametrize(("every", "seed"), every_and_seed(97))
def test_nodes_that_fail_anywhere(three_nodes: Scenario, every: int, seed: int, table: Table) -> None:
    check_every_failure(three_nodes, every, table, seed=seed)


def test_a_listing_before_its_files_is_found(
    three_nodes: Scenario, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed_first(local: Path, remote: Folder, without: Container[str] = ()) -> None:
        contents = {name: content for name, content in bytes_of(local).items() if not name.startswith(".")}
        files = {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        }
        remote.write_atomically(mirror.LISTING, canonical_json({"files": files, "sha256": sha256_json(files)}))
        mirror.push(local, remote, without)

    for module in (remote_run, object_store):
        monkeypatch.setattr(module, "push", listed_first)
    with pytest.raises(AssertionError, match=r"kind='kill'\) at 'put .*: KeyError"):
        check_every_failure(three_nodes, 4, table, kinds=("kill",))
