"""Runs whose home is an object store: the driver works in its node's cache, and keeps the home as it would a folder.

take the lease of the run, unless a living process has it
fetch the run's files; those of the ranks come through the journal
do the stages: data sets and indexes go to the home before ranks need them, and other files every ten seconds
at the end write what changed, and end the lease
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from multihop.cluster.console import console
from multihop.cluster.ray.node_cache import RunHome, node_folder
from multihop.cluster.runs.folder import when_free
from multihop.cluster.runs.recipe import Recipe
from multihop.common.cache import pin
from multihop.common.errors import FAILED
from multihop.common.files import make_folder, write_atomically
from multihop.common.journal import JournalReader
from multihop.common.lease import leased
from multihop.common.mirror import fetch, is_pushed, push
from multihop.common.storage import Folder, open_folder
from multihop.data_prep.dataset.verify import VERIFIED
from multihop.pretrain.run.files import JOURNAL, ROWS

_SCHEME = "s3://"
_EVERY_S = 10.0
_FILES = ("recipe.json", "changes.jsonl", "summary.json", "tracking.json", "report.html", "report.md", "loss.png")
_FOLDERS = ("eval",)
_NOT = ("weights",)
"""Subfolders of these that stay on the node."""


class RemoteRun:
    """The home of one run, and this node's copy of it."""

    def __init__(self, runs: str, name: str) -> None:
        """Nothing is fetched yet.

        Raises:
            UserError: the bucket does not exist or cannot be reached.
        """
        self.location = runs.rstrip("/")
        self.runs = folder_here(runs)
        self.folder = self.runs / name
        self._name = name
        self._there = open_folder(f"{self.location}/{name}", "--runs")
        self._pushed: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._used = ExitStack()

    def fetch_data(self, folder: Path) -> bool:
        """Fetch a prepared data set, if the home has it; `folder` is where this node has it."""
        there = open_folder(self._location_of(folder))
        if not is_pushed(there):
            return False
        console.print(f"data      fetched from {there.location}", markup=False)
        self._used.enter_context(pin(folder))
        fetch(there, folder)
        return True

    @contextmanager
    def preparing(self, store: Path) -> Iterator[str]:
        """Wait until no other process prepares data sets of these sources, and keep others from it for a block.

        Yields:
            The location of the stages' outputs.
        """
        location = self._location_of(store)
        place = open_folder(f"{location}/.lease")
        with ExitStack() as stack:
            when_free(lambda: stack.enter_context(leased(place, lambda: _leave(location))))
            yield f"{location}/work"

    def share_data(self, data: Path, streams: bool = False) -> RunHome:
        """Write a data set to the home, unless it is there; returns what nodes need to know.

        Args:
            streams: nodes fetch the shards for training while it goes on.

        Raises:
            OSError: the store cannot be written to.
        """
        data = data.resolve()
        self._used.enter_context(pin(data))
        there = open_folder(self._location_of(data))
        if not is_pushed(there):
            push(data, there, without=(VERIFIED,))
        return RunHome(self.location, self._name, data.relative_to(self.runs.resolve()).as_posix(), streams)

    def share_indexes(self) -> None:
        """Write what else the ranks need to the home; raises as `share_data`."""
        push(self.folder / "index", self._there.child("index"))
        self.push()

    def pull(self) -> None:
        """Have the files of the run as the home has them; others of an earlier copy are removed."""
        for name in (*_FILES, *_FOLDERS):
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            path.unlink(missing_ok=True)
        names = [name for name in self._there.files() if _is_kept(name)]
        for name in names:
            path = self.folder / name
            make_folder(path.parent)
            there, last = self._place_of(name)
            write_atomically(path, there.read_bytes(last, 2**32), mode=0o600)
            self._pushed[name] = _stamp(path)
        JournalReader(self._there.child(JOURNAL), self.folder, ROWS).read()

    def push(self) -> None:
        """Write to the home what changed here since it was read or written, and remove what is no more.

        Raises:
            OSError: the store cannot be written to.
        """
        with self._lock:
            here = _kept_files(self.folder)
            for name, stamp in here.items():
                if self._pushed.get(name) != stamp:
                    there, last = self._place_of(name)
                    there.write_atomically(last, (self.folder / name).read_bytes())
                    self._pushed[name] = stamp
            for name in self._pushed.keys() - here.keys():
                there, last = self._place_of(name)
                there.remove(last)
                del self._pushed[name]

    def close(self) -> None:
        """Let others remove its data set from the cache."""
        self._used.close()

    def _place_of(self, name: str) -> tuple[Folder, str]:
        folder, _, last = name.rpartition("/")
        return (self._there.child(folder) if folder else self._there), last

    def _location_of(self, folder: Path) -> str:
        return f"{self.location}/{folder.resolve().relative_to(self.runs.resolve()).as_posix()}"


def folder_here(runs: str) -> Path:
    """The folder of runs: as given, or this node's copies of what is in an object store."""
    return node_folder(runs.rstrip("/")) if runs.startswith(_SCHEME) else Path(runs)


def with_remote_checkpoints(recipe: Recipe, runs: str) -> Recipe:
    """The recipe of a run at a location in an object store: its checkpoints are there too, unless it says where."""
    if not runs.startswith(_SCHEME) or recipe.checkpoint.location is not None:
        return recipe
    checkpoint = recipe.checkpoint.model_copy(update={"location": f"{runs.rstrip('/')}/.checkpoints"})
    return recipe.model_copy(update={"checkpoint": checkpoint})


@contextmanager
def open_remote_run(runs: str, name: str) -> Iterator[RemoteRun | None]:
    """The home of a run, held for the length of a block; None if `runs` is a folder.

    Raises:
        UserError: another process holds it, or it cannot be reached.
    """
    if not runs.startswith(_SCHEME):
        yield None
        return
    home = RemoteRun(runs, name)

    with leased(open_folder(f"{home.location}/{name}/.lease"), lambda: _leave(f"{home.location}/{name}")):
        home.pull()
        ended = threading.Event()
        thread = threading.Thread(target=_push_now_and_then, args=(home, ended), daemon=True, name="home")
        thread.start()
        try:
            yield home
        finally:
            ended.set()
            thread.join()
            home.push()
            home.close()


def _leave(place: str) -> NoReturn:
    print(
        f"multihop: another process has taken over {place}, because this one could not reach the store for a minute; "
        "this one ends",
        file=sys.stderr,
        flush=True,
    )
    os._exit(FAILED)


def _push_now_and_then(home: RemoteRun, ended: threading.Event) -> None:
    told = False
    while not ended.wait(_EVERY_S):
        try:
            home.push()
            told = False
        except OSError as error:
            if not told:
                console.print(f"{home.location} cannot be written to ({error}); trying again", markup=False)
            told = True


def _kept_files(folder: Path) -> dict[str, tuple[int, int]]:
    paths = [folder / name for name in _FILES]
    paths += [path for name in _FOLDERS for path in (folder / name).rglob("*")]
    names = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file() and not path.is_symlink()}
    return {name: _stamp(path) for name, path in names.items() if _is_kept(name)}


def _is_kept(name: str) -> bool:
    *folders, last = name.split("/")
    if any(part.startswith(".") for part in (*folders, last)) or ".." in folders:
        return False
    return name in _FILES if not folders else folders[0] in _FOLDERS and not set(folders) & set(_NOT)


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
