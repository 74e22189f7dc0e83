"""Hashes of the input files, remembered with size and time so that unchanged files are not read again to know it."""

import json
from pathlib import Path

from data_prep.files import canonical_json, sha256_file, write_atomically
from data_prep.sources import InputFile, group_into_splits

UNREADABLE = ""
"""Stands for the hash of a file that cannot be opened."""


def groups(files: list[InputFile]) -> list[list[InputFile]]:
    """`files` in groups of about a split's size, each worth a task."""
    found = [[part.file for part in split if part.start == 0] for split in group_into_splits(files)]
    return [group for group in found if group]


def hash_files(files: list[InputFile]) -> dict[str, str]:
    """Path -> SHA-256, UNREADABLE where the file cannot be opened."""
    return {file.path: _hash(file.path) for file in files}


def recall(memory: Path, files: list[InputFile]) -> dict[str, str]:
    """The remembered hashes of those `files` whose size and time of change are as they were."""
    try:
        known = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return {
        file.path: known[file.path][2]
        for file in files
        if known.get(file.path, [None])[:2] == [file.size, file.mtime_ns]
    }


def remember(memory: Path, files: list[InputFile], hashes: dict[str, str]) -> None:
    """Keep `hashes` for `recall`. Unreadable files are tried again: being allowed to read changes no time."""
    known = {
        file.path: [file.size, file.mtime_ns, hashes[file.path]] for file in files if hashes[file.path] != UNREADABLE
    }
    write_atomically(memory, canonical_json(known))


def _hash(path: str) -> str:
    try:
        return sha256_file(path)
    except OSError:
        return UNREADABLE
