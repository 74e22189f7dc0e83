"""Runs stages on nodes that share only an object store.

An output is a folder in the store, STAGE/KEY: the file and its entry, written by the node that made it, and a listing,
written last. A node that needs it fetches it into its cache, checked by its hash. An item that names another file by
its path, an evaluation text on the caller's disk for example, runs on the caller's node.
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

from multihop.common.cache import cache_folder, evict_until_fits, evictable_folders, pin
from multihop.common.files import sha256_json
from multihop.common.mirror import LISTING, fetch, is_pushed, missing_bytes, push
from multihop.common.storage import Folder, open_folder
from multihop.data_prep.stages.outputs import Output, parse_entry
from multihop.data_prep.stages.runner import MapItems

_MAX_ENTRY_BYTES = 2**28


@dataclass(frozen=True)
class _Task:
    """Holds an item of a stage, for any node; its paths are those of the caller's node."""

    function: Callable[[Any], Any]
    item: Any
    location: str
    """Location of the outputs in the store."""
    cache_prefix: str
    """Prefix of paths in the caller's cache of outputs: a file with such a path is an input."""
    folder_prefixes: tuple[str, ...]
    """Prefixes of paths that the task writes."""


class ObjectStoreStages:
    """Keeps the outputs of stages at a location in a store, which one process at a time may use."""

    def __init__(self, location: str, folders: Sequence[Path], any_node: MapItems, this_node: MapItems) -> None:
        """Open the location.

        Args:
            folders: folders into which the stages would write on this node's disk.
            any_node: runs functions on any node.
            this_node: runs functions on this node.
        """
        self._store = open_folder(location, "--runs")
        self._cache = _cache_of(location)
        self._folder_prefixes = tuple(f"{folder}/" for folder in folders)
        self._any_node, self._this_node = any_node, this_node

    def map_items(self, function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
        """`MapItems` that does not make an output again if it is in the store."""
        local: list[_Task] = []
        anywhere: list[_Task] = []
        for item in items:
            task = _Task(function, item, self._store.location, f"{self._cache}/", self._folder_prefixes)
            (local if self._reads_files_of_this_node(item) else anywhere).append(task)
        for result in chain(self._any_node(_run_task, anywhere), self._this_node(_run_task, local)):
            yield replace(result, path=str(self._cache / result.path)) if isinstance(result, Output) else result

    @contextmanager
    def local_file(self, output: Output) -> Iterator[Path]:
        """`LocalFile` that fetches the output; raises as `fetch` and `evict_until_fits`."""
        with ExitStack() as pins:
            yield _fetch_output(self._store, os.path.relpath(output.path, self._cache), pins)

    def sweep(self, keys: Set[str]) -> None:
        """Remove all outputs but those of these keys from the store."""
        for name in self._store.files():
            folder, _, last = name.rpartition("/")
            if folder.rpartition("/")[2] not in keys:
                self._store.child(folder).remove(last)

    def _reads_files_of_this_node(self, item: Any) -> bool:
        shared = (f"{self._cache}/", *self._folder_prefixes)
        return any(path.startswith("/") and not path.startswith(shared) for path in _strings(item))


def _run_task(task: _Task) -> Any:
    """Run a task's function on this node; the path of an output is STAGE/KEY/NAME."""
    item, store = task.item, open_folder(task.location, "--runs")
    makes_output = hasattr(item, "folder")
    name = f"{Path(item.folder).name}/{item.key}" if makes_output else ""
    out = _cache_of(task.location) / name
    stored = _stored_output(store.child(name), item.key) if makes_output else None
    if stored is not None:
        return replace(stored, path=f"{name}/{stored.path}")
    _raise_open_file_limit()
    with ExitStack() as pins:
        if makes_output:
            pins.enter_context(pin(out))

        def local_path(path: str) -> str:
            if path.startswith(task.cache_prefix):
                return str(_fetch_output(store, path.removeprefix(task.cache_prefix), pins))
            if not path.startswith(task.folder_prefixes):
                return path
            return str(out if path == item.folder else out / Path(path).name)

        result = task.function(_map_strings(item, local_path))
        if not isinstance(result, Output):
            return result
        push(out, store.child(name))
        return replace(result, path=f"{name}/{Path(result.path).name}")


def _stored_output(folder: Folder, key: str) -> Output | None:
    """Return the output in a folder of the store, if it is whole; its path is its name."""
    entry = f"{key}.json"
    names = folder.names() if is_pushed(folder) else []
    if entry not in names:  # a stage writes no entry if it has to run again in the next start
        return None
    content = parse_entry(folder.read_bytes(entry, _MAX_ENTRY_BYTES))
    (name,) = set(names) - {entry, LISTING}
    return None if content is None else Output(key, name, content["sha256"], content["facts"])


def _cache_of(location: str) -> Path:
    """Return the folder of this node's cache for the outputs at a location."""
    return cache_folder("stages", sha256_json(location)[:16])


def _fetch_output(store: Folder, path: str, pins: ExitStack) -> Path:
    """Fetch the file of an output at STAGE/KEY/NAME into this node's cache; it is kept until `pins` ends."""
    folder, name = os.path.split(path)
    local = _cache_of(store.location) / folder
    pins.enter_context(pin(local))
    evict_until_fits(evictable_folders(), missing_bytes(store.child(folder), local))
    fetch(store.child(folder), local, lambda other: other == name)
    return local / name


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in an item."""
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


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """Replace each string in an item, but for those in settings."""
    if isinstance(value, str):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: _map_strings(getattr(value, each.name), function) for each in fields(value)}
        )
    if isinstance(value, dict):
        return {key: _map_strings(each, function) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(each, function) for each in value)
    return value


def _raise_open_file_limit() -> None:
    # A task that reads an output of every split keeps a file open for each.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
