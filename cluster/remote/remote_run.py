"""The driver's side of runs in an object store: it works in a copy in its node's cache, and uploads what changes.

take the lease of the run, unless a living process has it
download the run's files, and the ranks' rows through the journal
run the stages: upload data sets and indexes before ranks need them, and other files every ten seconds
at the end upload what changed, and release the lease
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from multihop.cluster.console import console
from multihop.cluster.locks import retry_while_in_use
from multihop.cluster.remote.lease import Lease, hold_lease
from multihop.cluster.remote.node_cache import RemoteRunSpec, node_folder
from multihop.common import clock
from multihop.common.cache import pin
from multihop.common.errors import FAILED, UserError
from multihop.common.files import make_folder, write_atomically
from multihop.common.journal import JournalReader
from multihop.common.mirror import fetch, is_pushed, push
from multihop.common.storage import Folder, open_folder
from multihop.data_prep.dataset.verify import VERIFIED
from multihop.eval.report import FILES_OF_A_RUN
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.run.files import AUDITS, JOURNAL, PLANS, ROWS

_Config = TypeVar("_Config", bound=TrainingConfig)
_SCHEME = "s3://"
_Stamp = tuple[int, int]
_EVERY_S = 10.0
_ATTEMPTS, _RETRY_S = 10, 1.0
_FILES = ("recipe.json", "changes.jsonl", "summary.json", "tracking.json", AUDITS, PLANS, *FILES_OF_A_RUN)
_FOLDERS = ("eval",)
_LOCAL_SUBFOLDERS = ("weights",)
"""Subfolders of _FOLDERS that are not uploaded."""


class RemoteRun:
    """A run in an object store, and this node's copy of it."""

    def __init__(self, runs: str, name: str) -> None:
        """Name the run; nothing is downloaded yet.

        Raises:
            UserError: the bucket does not exist or cannot be reached.
        """
        self.location = runs.rstrip("/")
        self.runs = local_runs_dir(runs)
        self.folder = self.runs / name
        self._name = name
        self._store = open_folder(f"{self.location}/{name}", "--runs")
        self._pushed: dict[str, tuple[_Stamp, str]] = {}
        """Name of a file -> its local state, and its version in the store, when both were last equal."""
        self._lock = threading.Lock()
        self._used = ExitStack()
        self.lease: Lease | None = None
        """The lease on the run, once it is held."""

    def fetch_data(self, folder: Path) -> bool:
        """Download a prepared data set into `folder` of the local copy; returns whether the store has it."""
        store = open_folder(self._location_of(folder))
        if not is_pushed(store):
            return False
        console.print(f"data      fetched from {store.location}", markup=False)
        self._used.enter_context(pin(folder))
        fetch(store, folder)
        return True

    @contextmanager
    def lock_preparation(self, store: Path) -> Iterator[str]:
        """Hold the lease on the preparation of data sets of these sources for a block, waiting for other processes.

        Yields:
            Location of the outputs of the preparation's stages.
        """
        location = self._location_of(store)
        lease = open_folder(f"{location}/.lease")
        with ExitStack() as stack:
            retry_while_in_use(lambda: stack.enter_context(hold_lease(lease, lambda: _exit_after_loss(location))))
            yield f"{location}/work"

    def upload_data(self, data: Path, streams: bool = False) -> RemoteRunSpec:
        """Upload a data set, unless the store has it; returns what the nodes are sent to find the run.

        Args:
            streams: whether nodes fetch training shards during training.

        Raises:
            OSError: the store cannot be written to.
        """
        data = data.resolve()
        self._used.enter_context(pin(data))
        store = open_folder(self._location_of(data))
        if not is_pushed(store):
            push(data, store, without=(VERIFIED,))
        return RemoteRunSpec(self.location, self._name, data.relative_to(self.runs.resolve()).as_posix(), streams)

    def upload_indexes(self) -> None:
        """Upload what else the ranks need; raises as `upload_data`."""
        push(self.folder / "index", self._store.child("index"))
        self.push()

    def pull(self) -> None:
        """Download the run's files; files of an earlier copy that the store does not have are removed."""
        for name in (*_FILES, *_FOLDERS):
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        names = [name for name in self._store.files() if _is_kept(name)]
        for name in names:
            path = self.folder / name
            make_folder(path.parent)
            store, last = self._parent_of(name)
            data, version = store.read(last)
            write_atomically(path, data, mode=0o600)
            self._pushed[name] = _stamp(path), version
        JournalReader(self._store.child(JOURNAL), self.folder, ROWS).read()

    def push(self, is_last: bool = False) -> None:
        """Upload what changed since it was downloaded or uploaded, and remove what no longer exists locally.

        This process may be suspended at any moment, for longer than the lease lasts and without its clocks noticing: it
        replaces only versions that it knows, so that nothing of the next holder is overwritten, and renews the lease
        afterwards, so that the next holder has downloaded what this one regards as uploaded.

        Args:
            is_last: list the store, and upload again what another holder's late request has removed.

        Raises:
            InUseError: another process has taken the lease.
            OSError: the store cannot be written to.
        """
        with self._lock:
            if self.lease is not None:
                self.lease.confirm()
            if is_last:
                left = set(self._store.files())
                self._pushed = {name: pushed for name, pushed in self._pushed.items() if name in left}
            local, changed = _kept_files(self.folder), False
            for name, stamp in local.items():
                was, version = self._pushed.get(name, (None, None))
                if was != stamp:
                    self._pushed[name], changed = (stamp, self._upload(name, version)), True
            for name in self._pushed.keys() - local.keys():
                store, last = self._parent_of(name)
                store.remove(last)
                del self._pushed[name]
            if changed and self.lease is not None:
                self.lease.renew()

    def _upload(self, name: str, version: str | None) -> str:
        """Replace a file in the store; returns its new version."""
        store, last = self._parent_of(name)
        data = (self.folder / name).read_bytes()
        for _ in range(_ATTEMPTS):
            new = store.replace(last, data, version)
            if new is not None:
                return new
            # A request of the holder before, or an own one without a response, came late. This process may replace what
            # it wrote, if it still holds the lease.
            if self.lease is not None:
                self.lease.renew()
            try:
                version = store.read(last)[1]
            except FileNotFoundError:
                version = None
            clock.sleep(_RETRY_S)
        raise OSError(f"{store.location}/{last} was changed by others {_ATTEMPTS} times in a row")

    def close(self) -> None:
        """Allow other runs to remove the data set from the cache."""
        self._used.close()

    def _parent_of(self, name: str) -> tuple[Folder, str]:
        folder, _, last = name.rpartition("/")
        return (self._store.child(folder) if folder else self._store), last

    def _location_of(self, folder: Path) -> str:
        return f"{self.location}/{folder.resolve().relative_to(self.runs.resolve()).as_posix()}"


def local_runs_dir(runs: str) -> Path:
    """Return the local folder of runs: `runs` itself, or the cache folder for runs in an object store."""
    return node_folder(runs.rstrip("/")) if runs.startswith(_SCHEME) else Path(runs)


def with_remote_checkpoints(recipe: _Config, runs: str) -> _Config:
    """Return the recipe with its checkpoints in the same object store as the runs, unless it sets
    checkpoint.location."""
    if not runs.startswith(_SCHEME) or recipe.checkpoint.location is not None:
        return recipe
    checkpoint = recipe.checkpoint.model_copy(update={"location": f"{runs.rstrip('/')}/.checkpoints"})
    return recipe.model_copy(update={"checkpoint": checkpoint})


@contextmanager
def open_remote_run(runs: str, name: str) -> Iterator[RemoteRun | None]:
    """Hold the lease of a run in an object store and keep the store up to date; yields None if `runs` is a folder.

    Raises:
        InUseError: another process holds the lease.
        UserError: the bucket does not exist or cannot be reached.
    """
    if not runs.startswith(_SCHEME):
        yield None
        return
    remote = RemoteRun(runs, name)
    location = f"{remote.location}/{name}"
    with hold_lease(open_folder(f"{location}/.lease"), lambda: _exit_after_loss(location)) as lease:
        remote.lease = lease
        remote.pull()
        ended = threading.Event()
        thread = threading.Thread(target=_push_regularly, args=(remote, ended), daemon=True, name="upload")
        thread.start()
        try:
            yield remote
        finally:
            ended.set()
            thread.join()
            remote.push(is_last=True)
            remote.close()


def _exit_after_loss(location: str) -> NoReturn:
    print(
        f"multihop: another process has taken over {location}, because this one could not reach the store for a "
        "minute; this one ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(FAILED)


def _push_regularly(remote: RemoteRun, ended: threading.Event) -> None:
    is_printed = False
    while not clock.wait(ended, _EVERY_S):
        try:
            remote.push()
            is_printed = False
        except (OSError, UserError) as error:
            if not is_printed:
                console.print(f"{remote.location} cannot be written to ({error}); trying again", markup=False)
            is_printed = True


def _kept_files(folder: Path) -> dict[str, _Stamp]:
    paths = [folder / name for name in _FILES]
    paths += [path for name in _FOLDERS for path in (folder / name).rglob("*")]
    names = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file() and not path.is_symlink()}
    return {name: _stamp(path) for name, path in names.items() if _is_kept(name)}


def _is_kept(name: str) -> bool:
    *folders, last = name.split("/")
    if any(part.startswith(".") for part in (*folders, last)) or ".." in folders:
        return False
    return name in _FILES if not folders else folders[0] in _FOLDERS and not set(folders) & set(_LOCAL_SUBFOLDERS)


def _stamp(path: Path) -> _Stamp:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
