"""Shards for training that a node fetches while its ranks train; see `multihop.pretrain.data.shard_requests`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from multihop.cluster.ray.node_cache import TRAINING_SHARDS, RunHome
from multihop.common import mirror
from multihop.common.cache import evict_until_fits, evictable_folders
from multihop.common.storage import open_folder
from multihop.pretrain.data.shard_requests import forget, requested

_POLL_S = 0.1


@contextmanager
def fetching_shards(home: RunHome, run_dir: Path, data: Path) -> Iterator[Callable[[], str | None]]:
    """For the length of a block, fetch the shards that the ranks of this node ask for, into the node's copy of the data
    set. Others are removed where the cache has no room. Ranks of one node take turns.

    Yields:
        Tells why no more shards come; None: they do.
    """
    forget(run_dir)
    ended, failed = threading.Event(), list[str]()

    def work() -> None:
        try:
            while not ended.wait(_POLL_S):
                for name in requested(run_dir):
                    if not ended.is_set() and not (data / name).exists():
                        with FileLock(data / ".shard.lock"):
                            _fetch(home, data, name, keep=requested(run_dir))
        except Exception as error:  # whatever it is, the ranks would wait for ever
            failed.append(str(error) or repr(error))

    thread = threading.Thread(target=work, daemon=True, name="shards")
    thread.start()
    try:
        yield lambda: failed[0] if failed else None
    finally:
        ended.set()
        thread.join()


def _fetch(home: RunHome, data: Path, name: str, keep: list[str]) -> None:
    if (data / name).exists():
        return
    there = open_folder(f"{home.runs}/{home.data}")
    others = [path for path in sorted(data.glob(f"{TRAINING_SHARDS}*")) if path.name not in keep]
    evict_until_fits(evictable_folders(), mirror.missing_bytes(there, data, name.__eq__), others)
    mirror.fetch(there, data, name.__eq__)
