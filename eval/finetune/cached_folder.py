"""Folders that are made once on a machine and mapped by all its trials. They are in its cache."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from filelock import FileLock

from multihop.common.cache import cache_folder
from multihop.common.files import read_json_object, sha256_file, sha256_json, sync

_HASHES = "sha256.json"


def cached_folder(identity: object, make: Callable[[Path], None]) -> Path:
    """Return the cached directory of an identity; it is created if it is missing, and again if its files are damaged.

    It is written under a temporary name, hashed, synced and renamed, by one process at a time. Every reader verifies
    the hashes: a flipped bit on the disk costs another encoding and never changes a score.

    Args:
        identity: everything that decides the content, as JSON values.
        make: writes the files into an empty folder.
    """
    folder = cache_folder("inputs", sha256_json(identity))
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if _is_whole(folder):
            return folder
        temporary = folder.with_name(f".{folder.name}.{uuid4().hex}")
        temporary.mkdir(mode=0o700)
        try:
            make(temporary)
            (temporary / _HASHES).write_text(json.dumps(_hashes(temporary)))
            for path in temporary.rglob("*"):
                sync(path)
            # Trials that have memory-mapped the damaged files keep them.
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        return read_json_object(folder / _HASHES) == _hashes(folder)
    except (OSError, ValueError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its relative path."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / _HASHES)
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
