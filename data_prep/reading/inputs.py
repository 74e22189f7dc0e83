"""Identities of the input files, remembered with size and time so that unchanged files are not read to know them."""

import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from data_prep.files import canonical_json, read_json_object, write_atomically
from data_prep.reading.failures import ReadFailed
from data_prep.reading.locations import block_bytes, is_remote, open_location, version_of
from data_prep.reading.sources import InputFile, group_into_splits, printable

UNREADABLE = "unreadable"
"""Stands for the identity of a file that cannot be opened."""
_REQUESTS = 16
"""That wait for their answers at once."""


def groups(files: list[InputFile]) -> list[list[InputFile]]:
    """`files` in groups of about a split's size, each worth a task."""
    found = [[part.file for part in split if part.start == 0] for split in group_into_splits(files)]
    return [group for group in found if group]


def hash_files(files: list[InputFile]) -> dict[str, str]:
    """Path -> identity, UNREADABLE where the file cannot be opened. Raises ReadFailed when a server does not answer."""
    if not any(is_remote(file.path) for file in files):
        return {file.path: identity(file) for file in files}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return dict(zip([file.path for file in files], pool.map(identity, files), strict=True))


def identified(files: list[InputFile], hashes: dict[str, str]) -> list[InputFile]:
    """`files`, each with its identity."""
    return [dataclasses.replace(file, identity=hashes[file.path]) for file in files]


def identity(file: InputFile) -> str:
    """What is the same as long as the content is: the SHA-256 of the bytes that were listed, or a server's ETag.

    A file without read permission or one that is gone is UNREADABLE. Raises ReadFailed when a server does not answer.
    """
    if file.problem:
        return file.problem
    try:
        if is_remote(file.path):
            size, _, version = version_of(file.path)
            if version:
                return f"{version} {size}"
        return _sha256(file)
    except ReadFailed:
        raise
    except OSError:
        return UNREADABLE


def has_changed(file: InputFile) -> bool:
    """Whether its first `size` bytes, as they were when it was listed, are others now or gone.

    Raises ReadFailed when a server does not answer.
    """
    try:
        size, mtime_ns, version = version_of(file.path)
    except ReadFailed:
        raise
    except OSError:
        return True
    if version and file.identity:
        return file.identity != f"{version} {size}"
    if (size, mtime_ns) == (file.size, file.mtime_ns):
        return False
    return size < file.size or (bool(file.identity) and identity(file) != file.identity)


def recall(memory: Path, files: list[InputFile]) -> dict[str, str]:
    """The remembered identities of those `files` whose size and time of change are as they were.

    What cannot be read is known by the problem that listing found.
    """
    try:
        known = read_json_object(memory, most_bytes=memory.stat().st_size)
    except (OSError, ValueError):
        known = {}
    found = {file.path: file.problem for file in files if file.problem}
    for file in files:
        match known.get(printable(file.path)):
            case [file.size, file.mtime_ns, str(remembered)] if not file.problem:
                found[file.path] = remembered
    return found


def remember(memory: Path, files: list[InputFile], hashes: dict[str, str]) -> None:
    """Keep `hashes` for `recall`. Unreadable files are tried again: being allowed to read changes no time."""
    known: dict[str, Any] = {
        printable(file.path): [file.size, file.mtime_ns, hashes[file.path]]
        for file in files
        if hashes[file.path] != UNREADABLE and not file.problem and file.mtime_ns
    }
    write_atomically(memory, canonical_json(known))


def _sha256(file: InputFile) -> str:
    digest = hashlib.sha256()
    place, block = open_location(file.path), block_bytes(file.path)
    try:
        at = 0
        while at < file.size:
            data = place.read_at(min(block, file.size - at), at)
            if not data:
                return UNREADABLE  # it has become shorter
            digest.update(data)
            at += len(data)
    finally:
        place.close()
    return digest.hexdigest()
