"""Makes stages restartable: an output is written once, hashed, renamed, and then recorded with its hash.

A stage's directory has a small JSON file, the entry, for each output, named by the output's key. The key is a hash of
everything that the output depends on, so outputs of other inputs or settings are never confused, and workers on many
machines record their outputs without waiting for each other.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from multihop.common.files import (
    atomic_replace,
    canonical_json,
    make_folder,
    open_regular,
    sha256_file,
    sha256_json,
    write_atomically,
)

_ENTRY_SHA256 = "own"
"""Key of an entry with the SHA-256 of the rest of it, since the metadata (a shard's size) goes into the manifest."""


@dataclass(frozen=True)
class Output:
    """Describes one finished output of a stage."""

    key: str
    path: str
    sha256: str
    metadata: dict[str, Any]
    """Counts and sizes, as JSON values."""


LocalFile = Callable[[Output], AbstractContextManager[Path]]
"""Makes the file of an output available on this node, for the length of a block."""


@contextmanager
def file_on_shared_disk(output: Output) -> Iterator[Path]:
    """`LocalFile` for nodes that share a disk."""
    yield Path(output.path)


def stage_key(stage: str, packages: list[str], *depends_on: Any) -> str:
    """Return the key of an output: a hash of everything that decides its bytes, versions of packages included."""
    versions = {name: _version_of(name) for name in ["pyarrow", *packages]}
    return sha256_json([stage, 1, versions, depends_on])[:32]


@cache
def _version_of(package: str) -> str:
    return version(package)  # reads and parses a file each time


def write_once(entry: Path, path: Path, write: Callable[[Path], dict[str, Any]]) -> Output:
    """Return the output at `path`, recorded in `entry` (KEY.json); unless it exists and has its hash, `write` makes it.

    Args:
        write: writes to the temporary path that it gets and returns the output's metadata.
    """
    finished = finished_output(entry, path)
    if finished is not None:
        return finished
    make_folder(entry.parent)
    make_folder(path.parent)
    with atomic_replace(path) as temporary:
        metadata = write(temporary)
        sha256 = sha256_file(temporary)
    written = {"sha256": sha256, "facts": metadata}
    write_atomically(entry, canonical_json({**written, _ENTRY_SHA256: sha256_json(written)}))
    # Through JSON, so that new metadata equals what is read from an entry.
    return Output(entry.stem, str(path), sha256, json.loads(canonical_json(metadata)))


def finished_output(entry: Path, path: Path) -> Output | None:
    """Return the output that `entry` records, if `path` has its hash."""
    content = read_entry(entry)
    if content is None or not path.is_file() or sha256_file(path) != content["sha256"]:
        return None
    return Output(entry.stem, str(path), content["sha256"], content["facts"])


def read_entry(entry: Path) -> dict[str, Any] | None:
    """Read an entry; returns None if it is missing or damaged."""
    try:
        with open_regular(entry) as file:
            return parse_entry(file.read())
    except OSError:
        return None


def parse_entry(content: bytes) -> dict[str, Any] | None:
    """Parse an entry; returns None if it is damaged. Entries of earlier versions have no hash of themselves."""
    try:
        entry = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.keys() - {_ENTRY_SHA256} != {"sha256", "facts"}:
        return None
    sha256 = entry.pop(_ENTRY_SHA256, None)
    return entry if sha256 in (None, sha256_json(entry)) else None


def write_batches(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], compression: str | None) -> None:
    """Write an Arrow file batch by batch."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_batches(path: str, columns: list[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file.

    Args:
        columns: indices of the columns to read; None: all.
    """
    options = pa.ipc.IpcReadOptions(included_fields=columns)
    with pa.memory_map(path) as mapped:
        reader = pa.ipc.open_file(mapped, options=options)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def read_batch(path: str, index: int) -> pa.RecordBatch:
    """Read one batch of an Arrow file, by its index."""
    with pa.memory_map(path) as mapped:
        return pa.ipc.open_file(mapped).get_batch(index)
