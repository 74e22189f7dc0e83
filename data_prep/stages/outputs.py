"""Makes stages restartable: an output is written once, hashed, renamed, and then entered with its hash.

A stage's directory has a small JSON file, the entry, for each output, named by the output's key. The key is a hash of
everything that the output depends on, so outputs of other inputs or settings are never confused, and workers on many
machines enter their outputs without waiting for each other.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from multihop.common.files import (
    canonical_json,
    make_folder,
    open_regular,
    replacing,
    sha256_file,
    sha256_json,
    write_atomically,
)

_OWN = "own"
"""In an entry: the SHA-256 of the rest of it, since the facts (a shard's size) go into the manifest."""


@dataclass(frozen=True)
class Output:
    """One finished output of a stage."""

    key: str
    path: str
    sha256: str
    facts: dict[str, Any]
    """Counts and sizes, as JSON."""


AtHand = Callable[[Output], AbstractContextManager[Path]]
"""The file of an output on this node, for the length of a block."""


@contextmanager
def on_disk(output: Output) -> Iterator[Path]:
    """`AtHand` where all nodes share a disk."""
    yield Path(output.path)


def stage_key(stage: str, packages: list[str], *depends_on: Any) -> str:
    """The key of an output: a hash of everything that decides its bytes, versions of packages included."""
    versions = {name: version(name) for name in ["pyarrow", *packages]}
    return sha256_json([stage, 1, versions, depends_on])[:32]


def once(entry: Path, path: Path, write: Callable[[Path], dict[str, Any]]) -> Output:
    """The output at `path`, entered in `entry` (KEY.json); made by `write` unless it exists and has its hash.

    `write` writes to the temporary path that it is given and returns the output's facts.
    """
    standing = standing_at(entry, path)
    if standing is not None:
        return standing
    make_folder(entry.parent)
    make_folder(path.parent)
    with replacing(path) as temporary:
        facts = write(temporary)
        sha256 = sha256_file(temporary)
    written = {"sha256": sha256, "facts": facts}
    write_atomically(entry, canonical_json({**written, _OWN: sha256_json(written)}))
    # Through JSON, so that new facts equal those read from an entry.
    return Output(entry.stem, str(path), sha256, json.loads(canonical_json(facts)))


def standing_at(entry: Path, path: Path) -> Output | None:
    """The output entered in `entry`, if `path` has its hash."""
    standing = read_entry(entry)
    if standing is None or not path.is_file() or sha256_file(path) != standing["sha256"]:
        return None
    return Output(entry.stem, str(path), standing["sha256"], standing["facts"])


def read_entry(entry: Path) -> dict[str, Any] | None:
    """The entry's content; None if it is missing or damaged."""
    try:
        with open_regular(entry) as file:
            return entry_in(file.read())
    except OSError:
        return None


def entry_in(content: bytes) -> dict[str, Any] | None:
    """What an entry's file holds; None if it is damaged. Entries of earlier versions have no hash of their own."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() - {_OWN} != {"sha256", "facts"}:
        return None
    own = found.pop(_OWN, None)
    return found if own in (None, sha256_json(found)) else None


def write_batches(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], compression: str | None) -> None:
    """Write an Arrow file batch by batch."""
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_batches(path: str, columns: list[int] | None = None) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow file; `columns` by position, None: all."""
    options = pa.ipc.IpcReadOptions(included_fields=columns)
    with pa.memory_map(path) as mapped:
        reader = pa.ipc.open_file(mapped, options=options)
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def read_batch(path: str, number: int) -> pa.RecordBatch:
    """One batch of an Arrow file."""
    with pa.memory_map(path) as mapped:
        return pa.ipc.open_file(mapped).get_batch(number)
