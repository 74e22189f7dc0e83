"""Arrays that are computed once from the data and then memory-mapped: FILE.npy, and FILE.json with its hash."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.common.files import (
    atomic_replace,
    canonical_json,
    make_folder,
    open_regular,
    read_json_object,
    sha256_file,
    write_atomically,
)


def ensure_array(path: Path, compute: Callable[[], NDArray[Any]], full: bool = False) -> None:
    """Write the result of `compute` to `path`, and record its hash, size and modification time; keep an intact file.

    A file whose size and modification time are those of its record is trusted without being read.

    Args:
        full: Hash the file in any case.
    """
    if _is_intact(path, full):
        return
    make_folder(path.parent)
    with atomic_replace(path) as temporary:
        with open(temporary, "xb") as file:
            np.save(file, compute())
        sha256 = sha256_file(temporary)
    _write_record(path, sha256)


def open_array(path: Path, dtype: type[np.generic], what: str) -> NDArray[Any]:
    """The array that `ensure_array` wrote, memory-mapped. Only `ensure_array` checks its hash.

    Args:
        what: What the file is, for the message.

    Raises:
        UserError: It is missing or damaged, or has another dtype.
    """
    try:
        open_regular(path).close()
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")  # refuses pickles and archives
        if array.dtype != dtype:
            raise UserError(f"it holds {array.dtype}")
    except (OSError, ValueError, EOFError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{what} {path} cannot be read ({reason}); rerun the same command to rebuild it") from None
    return array


def _record_of(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_record(path: Path, sha256: str) -> None:
    status = os.stat(path)
    record = {"sha256": sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    write_atomically(_record_of(path), canonical_json(record))


def _is_intact(path: Path, full: bool) -> bool:
    try:
        record, status = read_json_object(_record_of(path)), os.stat(path)
        if not full and (record.get("bytes"), record.get("mtime_ns")) == (status.st_size, status.st_mtime_ns):
            return True
        sha256 = sha256_file(path)
    except (OSError, ValueError):  # missing, damaged, or not a regular file: it is written again
        return False
    if record.get("sha256") != sha256:
        return False
    _write_record(path, sha256)
    return True
