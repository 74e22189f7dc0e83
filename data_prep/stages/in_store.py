"""Stages on nodes that have nothing in common but an object store.

An output is a folder in the store, STAGE/KEY: the file and its entry, written by the node that made it, and a listing,
written last. A node that needs it fetches it into its cache, checked by its hash. What reads another file by its path,
a text on the caller's disk for example, is done on the caller's node.
"""

import os
import resource
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from multihop.common.cache import cache_folder, make_room, prepared_copies, used
from multihop.common.files import sha256_json
from multihop.common.mapping import MapItems
from multihop.common.mirror import LISTING, fetch, is_pushed, missing_bytes, push
from multihop.common.storage import Folder, open_folder
from multihop.data_prep.stages.outputs import Output, entry_in

_MOST_ENTRY_BYTES = 2**28


@dataclass(frozen=True)
class _Task:
    """An item of a stage, for any node. Its paths are those of the caller's node."""

    function: Callable[[Any], Any]
    item: Any
    location: str
    """Of the outputs in the store."""
    caches: str
    """Where the caller's node has outputs that it fetched: what lies there is an input."""
    folders: tuple[str, ...]
    """What would lie in these is written."""


class StoredStages:
    """The outputs of stages at a location in a store, which one process at a time may use."""

    def __init__(self, location: str, folders: Sequence[Path], anywhere: MapItems, here: MapItems) -> None:
        """Args:
        folders: where the stages would write if they ran on this node's disk.
        anywhere, here: run functions on any node, and on this one.
        """
        self._there = open_folder(location, "--runs")
        self._caches = _caches(location)
        self._folders = tuple(f"{folder}/" for folder in folders)
        self._anywhere, self._here = anywhere, here

    def map_items(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """`MapItems`; an output that is in the store is not made again."""
        here: list[_Task] = []
        elsewhere: list[_Task] = []
        for item in items:
            task = _Task(function, item, self._there.location, f"{self._caches}/", self._folders)
            (here if self._reads_files_of_this_node(item) else elsewhere).append(task)
        for result in chain(self._anywhere(_do, elsewhere), self._here(_do, here)):
            yield replace(result, path=str(self._caches / result.path)) if isinstance(result, Output) else result

    @contextmanager
    def at_hand(self, output: Output) -> Iterator[Path]:
        """`AtHand`; raises as `fetch` and `make_room`."""
        with ExitStack() as held:
            yield _fetched(self._there, os.path.relpath(output.path, self._caches), held)

    def sweep(self, keys: Set[str]) -> None:
        """Remove all outputs but those of these keys from the store."""
        for name in self._there.files():
            folder, _, last = name.rpartition("/")
            if folder.rpartition("/")[2] not in keys:
                self._there.child(folder).remove(last)

    def _reads_files_of_this_node(self, item: Any) -> bool:
        others = (f"{self._caches}/", *self._folders)
        return any(path.startswith("/") and not path.startswith(others) for path in _strings(item))


def _do(task: _Task) -> Any:
    """Run a task's function on this node; the path of an output is STAGE/KEY/NAME."""
    item, there = task.item, open_folder(task.location, "--runs")
    makes_output = hasattr(item, "folder")
    name = f"{Path(item.folder).name}/{item.key}" if makes_output else ""
    made = _caches(task.location) / name
    standing = _standing(there.child(name), item.key) if makes_output else None
    if standing is not None:
        return replace(standing, path=f"{name}/{standing.path}")
    _allow_open_files()
    with ExitStack() as held:
        if makes_output:
            held.enter_context(used(made))

        def here(path: str) -> str:
            if path.startswith(task.caches):
                return str(_fetched(there, path.removeprefix(task.caches), held))
            if not path.startswith(task.folders):
                return path
            return str(made if path == item.folder else made / Path(path).name)

        result = task.function(_with_strings(item, here))
        if not isinstance(result, Output):
            return result
        push(made, there.child(name))
        return replace(result, path=f"{name}/{Path(result.path).name}")


def _standing(there: Folder, key: str) -> Output | None:
    """The output that is there; its path is its name."""
    entry = f"{key}.json"
    names = there.names() if is_pushed(there) else []
    if entry not in names:  # a stage enters nothing if it has to run again in the next start
        return None
    found = entry_in(there.read_bytes(entry, _MOST_ENTRY_BYTES))
    (name,) = set(names) - {entry, LISTING}
    return None if found is None else Output(key, name, found["sha256"], found["facts"])


def _caches(location: str) -> Path:
    """Where this node has the outputs at a location."""
    return cache_folder("stages", sha256_json(location)[:16])


def _fetched(there: Folder, path: str, held: ExitStack) -> Path:
    """The file of an output at STAGE/KEY/NAME in this node's cache; it stays there until `held` ends."""
    folder, name = os.path.split(path)
    local = _caches(there.location) / folder
    held.enter_context(used(local))
    make_room(prepared_copies(), missing_bytes(there.child(folder), local))
    fetch(there.child(folder), local, lambda other: other == name)
    return local / name


def _strings(value: Any) -> Iterator[str]:
    """All strings in an item."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, BaseModel):
        yield from _strings(value.model_dump())
    elif is_dataclass(value):
        yield from _strings([getattr(value, each.name) for each in fields(value)])
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


def _with_strings(value: Any, other: Callable[[str], str]) -> Any:
    """An item with each string replaced, but for those in settings."""
    if isinstance(value, str):
        return other(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _with_strings(getattr(value, each.name), other) for each in fields(value)})
    if isinstance(value, dict):
        return {key: _with_strings(each, other) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_strings(each, other) for each in value)
    return value


def _allow_open_files() -> None:
    """A task that reads an output of every split keeps a file open for each."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
