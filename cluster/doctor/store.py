"""Tests whether all nodes can write and read a folder or bucket for runs or checkpoints, how fast, and atomically.

Each function is called on a node. Each node writes a file, then reads its neighbor's, since its own would come from
its page cache. All nodes try to create one file at once, as two runs that want one folder would.
"""

import errno
import hashlib
import time
from collections.abc import Iterator
from typing import Any

from multihop.common.storage import Folder, open_folder

_CHUNK_BYTES, _CHUNKS = 4 * 2**20, 16
_OWNER = "owner"
_RETRY_S, _WRITERS_END_S = 0.5, 20.0


def write(location: str, trial: str, node: str) -> dict[str, Any]:
    """Write 64 MiB, and try to be the one that creates a file.

    Args:
        trial: name of a folder in `location`, which need not exist.
        node: name of this node's file.

    Returns:
        write_rate, in bytes per second; created: whether this node created the file that only one node may create;
        compares: whether a file in a bucket is replaced only in the version that was seen.

    Raises:
        OSError, UserError: the location cannot be written to.
    """
    folder, content = _folder(location, trial), list(_content(node))
    started = time.perf_counter()
    folder.write(node, content)
    seconds = time.perf_counter() - started
    return {
        "write_rate": _CHUNK_BYTES * _CHUNKS / seconds,
        "created": folder.create(_OWNER, node.encode(), writer=node),
        "compares": folder.is_local or _compares_versions(folder, f"{node}-version"),
    }


def read(location: str, trial: str, other: str) -> dict[str, Any]:
    """Read another node's file.

    Returns:
        read_rate, in bytes per second; same: whether it is what that node wrote; owner: the node that the other file
        names.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    folder = _folder(location, trial)
    started = time.perf_counter()
    with folder.open(other) as file:
        content = b"".join(file.chunks())
    seconds = time.perf_counter() - started
    return {
        "read_rate": _CHUNK_BYTES * _CHUNKS / seconds,
        "same": content == b"".join(_content(other)),
        "owner": folder.read_bytes(_OWNER).decode(),
    }


def _compares_versions(folder: Folder, name: str) -> bool:
    return folder.replace(name, b"first", None) is not None and folder.replace(name, b"second", '"another"') is None


def remove(location: str, trial: str) -> None:
    """Remove the trial's directory with its content; all nodes may call this at once.

    Ray may report a canceled task as ended before its process is interrupted, so `write` may still add files:
    this returns once the directory was absent twice in a row, or after 20 s.
    """
    folder, absent, deadline = _folder(location, trial), 0, time.monotonic() + _WRITERS_END_S
    while absent < 2 and time.monotonic() < deadline:
        names = folder.names()
        absent = 0 if names else absent + 1
        for name in names:
            folder.remove(name)
        try:
            folder.remove_if_empty()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            absent = 0
        if absent < 2:
            time.sleep(_RETRY_S)


def _folder(location: str, trial: str) -> Folder:
    return open_folder(location).child(f".doctor-{trial}")


def _content(node: str) -> Iterator[bytes]:
    """Yield 64 MiB that no store compresses, and that differ from those of other nodes."""
    for number in range(_CHUNKS):
        yield hashlib.shake_256(f"{node} {number}".encode()).digest(_CHUNK_BYTES)
