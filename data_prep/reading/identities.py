"""Identifies the contents of the input files; caches the identities by size and modification time."""

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from multihop.common.files import canonical_json, read_json_object, write_atomically
from multihop.data_prep.reading.errors import ReadFailed
from multihop.data_prep.reading.locations import block_bytes, is_remote, open_location, version_of
from multihop.data_prep.reading.sources import InputFile, group_into_splits, with_targets

UNREADABLE = "unreadable"
"""The identity of a file that cannot be opened."""
_SHA256 = re.compile("[0-9a-f]{64}")
_REQUESTS = 16
"""Concurrent requests."""


def group_files(files: Sequence[InputFile]) -> list[list[InputFile]]:
    """Group files to about a split's size, one group for each task."""
    groups = [[each.file for each in ranges if each.start == 0] for ranges in group_into_splits(files)]
    return [group for group in groups if group]


def hash_files(files: list[InputFile]) -> dict[str, str]:
    """Return identities by path, UNREADABLE for files that cannot be opened.

    Raises:
        ReadFailed: as `content_identity`.
    """
    if not any(is_remote(file.path) for file in files):
        return {file.path: content_identity(file) for file in files}
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return dict(zip([file.path for file in files], pool.map(content_identity, files), strict=True))


def with_identities(files: Sequence[InputFile], hashes: dict[str, str]) -> list[InputFile]:
    """Add its identity to each file."""

    def with_identity(file: InputFile) -> InputFile:
        target = None if file.target is None else with_identity(file.target)
        return dataclasses.replace(file, identity=hashes[file.path], target=target)

    return [with_identity(file) for file in files]


def content_identity(file: InputFile) -> str:
    """Return the identity of a file's content: the SHA-256 of the bytes that were listed, or a server's version.

    A missing file and one without read permission are UNREADABLE. Raises ReadFailed when a server does not answer.
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


def is_identified_by_content(file: InputFile) -> bool:
    """Return whether the file is remote and its server reports no version: only a hash shows whether it has changed."""
    return is_remote(file.path) and _SHA256.fullmatch(file.identity) is not None


def has_changed(file: InputFile) -> bool:
    """Return whether the first `size` bytes, of when the file was listed, differ now or are gone.

    Raises:
        ReadFailed: a server does not answer.
    """
    try:
        size, mtime_ns, version = version_of(file.path)
    except ReadFailed:
        raise
    except OSError:
        return True
    if version and file.identity:
        return file.identity != f"{version} {size}"
    if (size, mtime_ns) == (file.size, file.mtime_ns) and not is_identified_by_content(file):
        return False
    return size < file.size or (bool(file.identity) and content_identity(file) != file.identity)


def load_identities(cache: Path, files: Sequence[InputFile]) -> dict[str, str]:
    """Return the known identities of `files`, by path: those with a listed version, or with a cached size and
    modification time.

    The identity of a file that cannot be read is the problem that listing reported.
    """
    try:
        known = read_json_object(cache, max_bytes=cache.stat().st_size)
    except (OSError, ValueError):
        known = {}
    hashes = {file.path: file.problem for file in files if file.problem}
    for file in with_targets(files):
        if file.version and not file.problem:
            hashes[file.path] = f"{file.version} {file.size}"
            continue
        match known.get(_as_json(file.path)):
            case [file.size, file.mtime_ns, str(cached)] if not file.problem:
                hashes[file.path] = cached
    return hashes


def save_identities(cache: Path, files: Sequence[InputFile], hashes: dict[str, str]) -> None:
    """Write `hashes` for `load_identities`, without unreadable files: a change of permissions changes no modification
    time."""
    known: dict[str, Any] = {
        _as_json(file.path): [file.size, file.mtime_ns, hashes[file.path]]
        for file in with_targets(files)
        if hashes[file.path] != UNREADABLE and not file.problem and not file.version and file.mtime_ns
    }
    write_atomically(cache, canonical_json(known))


def _as_json(path: str) -> str:
    """Return a path with any bytes as a string for JSON, injectively."""
    return path.encode("unicode_escape").decode()


def _sha256(file: InputFile) -> str:
    digest = hashlib.sha256()
    handle, block = open_location(file.path), block_bytes(file.path)
    try:
        at = 0
        while at < file.size:
            data = handle.read_at(min(block, file.size - at), at)
            if not data:
                return UNREADABLE  # the file became shorter
            digest.update(data)
            at += len(data)
    finally:
        handle.close()
    return digest.hexdigest()
