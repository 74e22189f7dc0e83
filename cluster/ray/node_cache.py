"""A node's copy of a run whose nodes have no folder in common: what its ranks read, and what they tell.

The copy is a folder as ranks have one everywhere. What the driver wrote into the run's home is fetched before they
start; requests to them appear as files here as they do there; their rows go to the home through the journal, and their
logs when they end.
"""

import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from multihop.common import mirror
from multihop.common.cache import cache_folder, evict_until_fits, evictable_folders, pin
from multihop.common.files import make_folder, sha256_json, write_atomically
from multihop.common.storage import open_folder
from multihop.pretrain.run.files import GAVE_UP
from multihop.pretrain.run.stop import RESTART_FILE, STOP_FILE

CONTROL = "control"
"""Where a home has requests to the ranks."""
LOST_FILE = "lost"
"""The request by which the driver ends all ranks; it holds the reason."""
TRAINING_SHARDS = "train-"
"""What the names of a data set's shards for training begin with."""
REQUESTS = (STOP_FILE, RESTART_FILE, LOST_FILE)
FETCHED = ("recipe.json", "changes.jsonl")
"""What the ranks read beside the data and the indexes."""
_POLL_S = 1.0
_MOST_LOG_BYTES = 64 * 2**20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunHome:
    """A run in an object store, in plain values that travel to the nodes."""

    runs: str
    """Location of all runs, s3://BUCKET/PREFIX."""
    name: str
    data: str
    """The run's data set, relative to `runs`."""
    streams: bool = False
    """Whether nodes fetch the shards for training while it goes on."""

    @property
    def location(self) -> str:
        """Of the run."""
        return f"{self.runs}/{self.name}"


def node_folder(runs: str) -> Path:
    """Where a node has its copies of what is at a location of runs."""
    return cache_folder("homes", sha256_json(runs)[:16])


def fetch_run(home: RunHome, data: Path) -> Path:
    """Have a copy of a run; returns its folder. Ranks of one node wait for each other.

    Args:
        data: the node's copy of its data set.

    Raises:
        UserError: something is missing or damaged in the home.
        OSError: the store cannot be read, or the disk not written to.
    """
    folder = node_folder(home.runs) / ".ranks" / home.name
    make_folder(folder, mode=0o700)
    there = open_folder(home.location)
    mirror.fetch(there.child("index"), folder / "index")
    for name in FETCHED:
        with suppress(FileNotFoundError):
            write_atomically(folder / name, there.read_bytes(name, 2**28), mode=0o600)
    link, temporary = folder / "data", folder / f".data.{secrets.token_hex(4)}"
    temporary.symlink_to(data, target_is_directory=True)
    os.replace(temporary, link)  # in one step: another rank of this node may do the same
    return folder


@contextmanager
def data_of(home: RunHome, training: bool = True) -> Iterator[Path]:
    """The folder of a copy of a run's data set, which stays for the length of a block. Other runs' data sets that
    nobody uses are removed for it, if the node's cache has a limit.

    Args:
        training: with the shards for training, unless they are fetched while training goes on.

    Raises:
        UserError: as `fetch` and `evict_until_fits`.
        OSError: as `fetch`.
    """
    data, there = node_folder(home.runs) / home.data, open_folder(f"{home.runs}/{home.data}")
    with pin(data):
        wanted = _every if training and not home.streams else _all_but_training_shards
        evict_until_fits(evictable_folders(), mirror.missing_bytes(there, data, wanted) if training else 0)
        mirror.fetch(there, data, wanted)
        yield data


def _every(name: str) -> bool:
    return True


def _all_but_training_shards(name: str) -> bool:
    return not name.startswith(TRAINING_SHARDS)


@contextmanager
def requests_as_files(home: RunHome, folder: Path) -> Iterator[None]:
    """For the length of a block, requests to the ranks in the home are files in a node's copy, a second later. Those
    to earlier ranks are removed from it first."""
    control, ended = open_folder(home.location).child(CONTROL), threading.Event()
    for name in (*REQUESTS, GAVE_UP):
        (folder / name).unlink(missing_ok=True)

    def look() -> None:
        told = False
        while not ended.wait(_POLL_S):
            try:
                for name in control.names():
                    if not (folder / name).exists():
                        write_atomically(folder / name, control.read_bytes(name))
                told = False
            except OSError as error:
                if not told:
                    log.warning("%s cannot be read (%s); trying again", control.location, error)
                told = True

    thread = threading.Thread(target=look, daemon=True, name="requests")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def upload_logs(home: RunHome, start: int, folder: Path, rank: int, log_from: int) -> None:
    """Write a rank's log since its start, and why it gave up if it did, to the home.

    Args:
        log_from: size of the log file before its start; of more than 64 MiB since then, only the last are written.

    Raises:
        OSError: the store cannot be written to.
    """
    there = open_folder(home.location)
    if (folder / GAVE_UP).exists():
        there.write_atomically(GAVE_UP, (folder / GAVE_UP).read_bytes())
    path = log_of(folder, rank)
    if path.exists():
        with open(path, "rb") as file:
            file.seek(max(log_from, path.stat().st_size - _MOST_LOG_BYTES))
            there.child("logs").write_atomically(f"rank-{rank}.start-{start}.log", file.read())


def log_of(folder: Path, rank: int) -> Path:
    """The log file of a rank on its node."""
    return folder / "logs" / f"rank-{rank}.log"
