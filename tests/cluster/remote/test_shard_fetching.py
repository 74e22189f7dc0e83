"""A node fetches shards from a store while its ranks train, when they request them."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from many_shards import prepare_many_shards
from s3_endpoint import S3

from multihop.cluster.remote.node_cache import RemoteRunSpec, fetch_data, fetch_requested_shards
from multihop.common.cache import LIMIT
from multihop.common.mirror import LISTING, push
from multihop.common.storage import open_folder
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.pretrain.data.shard_requests import request_shards


@pytest.fixture(scope="module")
def whole(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set in many shards."""
    folder = tmp_path_factory.mktemp("whole")
    data = DataConfig(sources=[Source(path=str(texts))], heldout_fraction=0.1)
    prepare_many_shards(data, TokenizerConfig(vocab_size=100, special_tokens="gpt2"), folder)
    return folder


@pytest.fixture
def spec(whole: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RemoteRunSpec:
    """A run in a store, for a node with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    push(whole, open_folder(f"{bucket}/runs/.prepared/sources/set"))
    return RemoteRunSpec(f"{bucket}/runs", "run", ".prepared/sources/set", streams=True)


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("train-*.arrow"))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_shards_come_as_they_are_requested(spec: RemoteRunSpec, whole: Path, s3: S3, tmp_path: Path) -> None:
    every = shards_in(whole)
    assert len(every) > 20
    request_shards(tmp_path, every)  # of earlier ranks
    with fetch_data(spec) as data, fetch_requested_shards(spec, tmp_path, data) as fails:
        assert shards_in(data) == [] and (data / "manifest.json").exists() and list(data.glob("heldout-*"))
        s3.failing_every = 3
        for wanted in (every[5:8], every[7:10]):
            request_shards(tmp_path, wanted)
            wait_for(lambda: set(wanted) <= set(shards_in(data)))  # noqa: B023
        assert shards_in(data) == every[5:10] and fails() is None
        assert all((data / name).read_bytes() == (whole / name).read_bytes() for name in every[5:10])


def test_each_shard_takes_the_same_requests(spec: RemoteRunSpec, whole: Path, s3: S3, tmp_path: Path) -> None:
    """The listing, whose size grows with the number of shards, is not read again for each of them."""
    every = shards_in(whole)[:9]
    with fetch_data(spec) as data, fetch_requested_shards(spec, tmp_path, data):
        before = len(s3.requests)
        for name in every:
            request_shards(tmp_path, [name])
            wait_for((data / name).exists)
    paths = [path for _, path in s3.requests[before:]]
    assert sum(path.endswith(LISTING) for path in paths) <= 2  # HEAD and GET, if they were not sent before
    of_shards = [sum(path.endswith(name) for path in paths) for name in every]
    assert of_shards == [of_shards[0]] * 9 and sum(of_shards) >= len(paths) - 2


def test_what_is_no_longer_wanted_makes_room(
    spec: RemoteRunSpec, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = shards_in(whole)
    rest = sum(path.stat().st_size for path in whole.iterdir() if path.is_file() and path.name not in every)
    largest = max((whole / name).stat().st_size for name in every)
    monkeypatch.setenv(LIMIT, str((rest + 20_000 + 5 * largest) / 1e9))  # the lists of files have some kilobytes
    with fetch_data(spec) as data, fetch_requested_shards(spec, tmp_path, data) as fails:
        seen: set[str] = set()
        for first in range(0, len(every) - 3, 3):
            wanted = every[first : first + 3]
            request_shards(tmp_path, wanted)
            wait_for(lambda: set(wanted) <= set(shards_in(data)))  # noqa: B023
            seen |= set(shards_in(data))
        assert fails() is None and len(shards_in(data)) < len(seen)
        request_shards(tmp_path, every)
        wait_for(fails)
        assert "leaves no room" in str(fails())


def test_a_damaged_shard_is_reported(spec: RemoteRunSpec, whole: Path, tmp_path: Path) -> None:
    broken = shards_in(whole)[3]
    remote_location = open_folder(f"{spec.runs}/{spec.data}")
    content = bytearray((whole / broken).read_bytes())
    content[100] ^= 1
    remote_location.write_atomically(broken, bytes(content))
    with fetch_data(spec) as data, fetch_requested_shards(spec, tmp_path, data) as fails:
        request_shards(tmp_path, [broken])
        wait_for(fails)
        assert f"{broken} is damaged" in str(fails()) and shards_in(data) == []


def test_without_windows_all_shards_come_first(spec: RemoteRunSpec, whole: Path) -> None:
    with fetch_data(RemoteRunSpec(spec.runs, spec.name, spec.data)) as data:
        assert shards_in(data) == shards_in(whole)
    shutil.rmtree(data)
    with fetch_data(spec, training=False) as data:
        assert shards_in(data) == []
