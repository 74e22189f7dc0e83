"""A node's copy of a run that is in an object store.

It is a run folder as ranks have one on a shared file system. Before the ranks start, the node fetches the data set, the
indexes and the recipe. While they run, requests from the driver are downloaded as files, shards are fetched as the
ranks ask for them, and rows are uploaded through the journal. When they end, their logs are uploaded.
"""

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from multihop.common import mirror
from multihop.common.cache import cache_folder, evict_until_fits, evictable_folders, pin
from multihop.common.files import make_folder, sha256_json, write_atomically
from multihop.common.storage import Folder, open_folder
from multihop.pretrain.data.shard_requests import clear_requests, requested_shards
from multihop.pretrain.run.files import GAVE_UP, RESTART_FILE, STOP_FILE

CONTROL = "control"
"""Folder of the remote run with requests to the ranks."""
LOST_FILE = "lost"
"""File by which the driver ends all ranks; it holds the reason."""
TRAINING_SHARDS = "train-"
"""Prefix of the file names of training shards."""
REQUESTS = (STOP_FILE, RESTART_FILE, LOST_FILE)
FETCHED = ("recipe.json", "changes.jsonl")
"""Files that the ranks read besides the data and the indexes."""
_POLL_S = 1.0
_SHARD_POLL_S = 0.1
_MOST_LOG_BYTES = 64 * 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteRunSpec:
    """A run in an object store as plain values, which are sent to the nodes."""

    runs: str
    """Location of all runs, s3://BUCKET/PREFIX."""
    name: str
    data: str
    """Path of the run's data set, relative to `runs`."""
    streams: bool = False
    """Whether nodes fetch training shards during training, as the ranks ask for them."""

    @property
    def location(self) -> str:
        """Location of the run, s3://BUCKET/PREFIX/NAME."""
        return f"{self.runs}/{self.name}"


def node_folder(runs: str) -> Path:
    """Return the cache folder for copies of what is below s3://BUCKET/PREFIX."""
    return cache_folder("remote-runs", sha256_json(runs)[:16])


def fetch_run(spec: RemoteRunSpec, data: Path) -> Path:
    """Fetch a run's indexes, recipe and changes; returns the local run folder. Ranks of one node wait for each other.

    Args:
        data: folder of the node's copy of the data set.

    Raises:
        UserError: a file is missing or damaged in the store.
        OSError: the store cannot be read, or the disk not written to.
    """
    folder = node_folder(spec.runs) / ".ranks" / spec.name
    make_folder(folder, mode=0o700)
    store = open_folder(spec.location)
    mirror.fetch(store.child("index"), folder / "index")
    for name in FETCHED:
        with suppress(FileNotFoundError):
            write_atomically(folder / name, store.read_bytes(name, 2**28), mode=0o600)
    link, temporary = folder / "data", folder / f".data.{secrets.token_hex(4)}"
    temporary.symlink_to(data, target_is_directory=True)
    os.replace(temporary, link)  # in one step: another rank of this node may do the same
    return folder


@contextmanager
def fetch_data(spec: RemoteRunSpec, training: bool = True) -> Iterator[Path]:
    """Fetch a run's data set; its folder stays in the cache for the length of a block. If the cache has a limit, data
    sets of other runs that nobody uses are removed.

    Args:
        training: whether training shards are needed. They are not fetched if the run streams them.

    Raises:
        UserError: as `fetch` and `evict_until_fits`.
        OSError: as `fetch`.
    """
    data, store = node_folder(spec.runs) / spec.data, open_folder(f"{spec.runs}/{spec.data}")
    with pin(data):
        wanted = _is_any if training and not spec.streams else _is_no_training_shard
        evict_until_fits(evictable_folders(), mirror.missing_bytes(store, data, wanted) if training else 0)
        mirror.fetch(store, data, wanted)
        yield data


def _is_any(name: str) -> bool:
    return True


def _is_no_training_shard(name: str) -> bool:
    return not name.startswith(TRAINING_SHARDS)


@contextmanager
def fetch_requested_shards(spec: RemoteRunSpec, run_dir: Path, data: Path) -> Iterator[Callable[[], str | None]]:
    """Fetch the shards that the ranks of this node ask for (`multihop.pretrain.data.shard_requests`), for the length of
    a block. Other shards are removed if the cache has no room. Ranks of one node take turns.

    Yields:
        A function that returns why no more shards will come, or None.
    """
    clear_requests(run_dir)
    ended, failed = threading.Event(), list[str]()

    def fetch() -> None:
        try:
            store = open_folder(f"{spec.runs}/{spec.data}")
            listing = mirror.read_listing(store)  # once: its size grows with the number of shards
            while not ended.wait(_SHARD_POLL_S):
                for name in requested_shards(run_dir):
                    if not ended.is_set() and not (data / name).exists():
                        with FileLock(data / ".shard.lock"):
                            _fetch_shard(store, data / name, listing[name], keep=requested_shards(run_dir))
        except Exception as error:  # whatever it is, the ranks would wait for ever
            failed.append(str(error) or repr(error))

    thread = threading.Thread(target=fetch, daemon=True, name="shards")
    thread.start()
    try:
        yield lambda: failed[0] if failed else None
    finally:
        ended.set()
        thread.join()


def _fetch_shard(store: Folder, path: Path, entry: mirror.Entry, keep: list[str]) -> None:
    if not path.exists():
        evict_until_fits(evictable_folders(), entry["bytes"], _other_shards(path.parent, keep))
        mirror.fetch_file(store, path, entry)


def _other_shards(data: Path, keep: list[str]) -> Iterator[Path]:
    """Yield the shards that may be removed. They are listed only if the cache has no room."""
    yield from (path for path in sorted(data.glob(f"{TRAINING_SHARDS}*")) if path.name not in keep)


@contextmanager
def download_requests(spec: RemoteRunSpec, folder: Path) -> Iterator[None]:
    """Download requests to the ranks into the local run folder for the length of a block, once a second. Requests to
    earlier ranks are removed first."""
    control, ended = open_folder(spec.location, polled=True).child(CONTROL), threading.Event()
    for name in (*REQUESTS, GAVE_UP):
        (folder / name).unlink(missing_ok=True)

    def download() -> None:
        is_logged = False
        while not ended.wait(_POLL_S):
            try:
                for name in control.names():
                    if not (folder / name).exists():
                        write_atomically(folder / name, control.read_bytes(name))
                is_logged = False
            except OSError as error:
                if not is_logged:
                    log.warning("%s cannot be read (%s); trying again", control.location, error)
                is_logged = True

    thread = threading.Thread(target=download, daemon=True, name="requests")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def upload_logs(spec: RemoteRunSpec, launch: int, folder: Path, rank: int, log_from: int) -> None:
    """Upload a rank's log since its launch, and gave-up.json if the rank wrote it.

    Args:
        launch: number of the launch, from 1 on.
        log_from: size of the log file before the launch. At most the last 64 MiB are uploaded.

    Raises:
        OSError: the store cannot be written to.
    """
    store = open_folder(spec.location)
    if (folder / GAVE_UP).exists():
        store.write_atomically(GAVE_UP, (folder / GAVE_UP).read_bytes())
    path = log_of(folder, rank)
    if path.exists():
        with open(path, "rb") as file:
            file.seek(max(log_from, path.stat().st_size - _MOST_LOG_BYTES))
            store.child("logs").write_atomically(f"rank-{rank}.launch-{launch}.log", file.read())


def log_of(folder: Path, rank: int) -> Path:
    """Return the log file of a rank."""
    return folder / "logs" / f"rank-{rank}.log"
