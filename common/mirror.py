"""Folders that are copied to a storage location and fetched from it, each file checked by its hash.

The listing, with size and SHA-256 of each file, is written last: a remote folder without it does not exist. The files
that it names never change. It holds its own hash, and its names cannot lead out of the folder.
"""

import hashlib
import os
import re
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from multihop.common.errors import UserError
from multihop.common.files import (
    atomic_replace,
    canonical_json,
    json_object,
    make_folder,
    open_regular,
    read_json_object,
    sha256_file,
    sha256_json,
    write_atomically,
)
from multihop.common.storage import Folder

LISTING = "files.json"
FETCHED = ".fetched.json"
"""File in a fetched folder with the size and modification time of each file when it had its hash, and the hash."""
_BLOCK = 8 * 2**20
_MOST_BYTES = 2**28
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")
_HASH = re.compile(r"[0-9a-f]{64}")
Entry = dict[str, Any]
"""What the listing has of a file: `bytes` and `sha256`."""


def is_pushed(remote: Folder) -> bool:
    """Whether a location holds a whole copy."""
    return remote.size(LISTING) is not None


def push(local: Path, remote: Folder, without: Container[str] = ()) -> None:
    """Copy the files of a folder, without its subfolders and hidden files, and then write the listing.

    Args:
        without: names of files to leave out.

    Raises:
        OSError: the store cannot be written to.
    """
    files = {}
    for path in sorted(local.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.name not in without:
            digest = hashlib.sha256()
            remote.write(path.name, _hashed(path, digest))
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
    remote.write_atomically(LISTING, canonical_json({"files": files, "sha256": sha256_json(files)}))


def missing_bytes(remote: Folder, local: Path, wanted: Callable[[str], bool] = lambda name: True) -> int:
    """Return the bytes of the wanted files of a pushed folder that a local copy lacks; raises as `fetch`."""
    missing = {name: entry["bytes"] for name, entry in read_listing(remote).items() if not (local / name).exists()}
    return sum(size for name, size in missing.items() if wanted(name))


def fetch(remote: Folder, local: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Fetch a pushed folder into `local`. Files that exist with their hash are not fetched again.

    Processes of this machine that fetch the same folder wait for each other.

    Args:
        wanted: returns whether a file of this name is needed; others are left out.

    Raises:
        UserError: the location holds no whole copy, or a file differs from its listing.
        OSError: the store cannot be read, or the disk cannot be written to.
    """
    listing = read_listing(remote)
    make_folder(local)
    with FileLock(local / ".fetch.lock"):
        seen = _seen(local)
        for name, entry in listing.items():
            if not wanted(name):
                continue
            path = local / name
            stamp = _stamp(path, entry)
            if stamp is None or (stamp != seen.get(name) and not _has(path, entry)):
                fetch_file(remote, path, entry)
            seen[name] = _stamp(path, entry)
        write_atomically(local / FETCHED, canonical_json(seen))


def fetch_file(remote: Folder, path: Path, entry: Entry) -> None:
    """Fetch one file of a pushed folder to `path`, which has its name; it appears there only with its hash. Raises as
    `fetch`."""
    with atomic_replace(path) as temporary, remote.open(path.name) as source:
        digest = hashlib.sha256()
        with open(temporary, "xb") as file:
            for chunk in source.chunks():
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != entry["sha256"]:
            raise UserError(
                f"{remote.location}/{path.name} is damaged (its hash differs from the one in {LISTING}); remove "
                f"{remote.location}: it is made or copied again"
            )


def read_listing(remote: Folder) -> dict[str, Entry]:
    """The entry of each file of a pushed folder, by name; raises as `fetch`."""
    path = f"{remote.location}/{LISTING}"
    try:
        data = remote.read_bytes(LISTING, _MOST_BYTES)
    except FileNotFoundError:
        raise UserError(f"{remote.location} holds no whole copy ({LISTING} is missing)") from None
    content = json_object(data, path, advice=f"remove {remote.location}: it is copied again", max_bytes=_MOST_BYTES)
    files = content.get("files")
    if not isinstance(files, dict) or content.get("sha256") != sha256_json(files):
        raise UserError(f"{path} is damaged; remove {remote.location}: it is copied again")
    for name, entry in files.items():
        if not (_NAME.fullmatch(name) and _HASH.fullmatch(str(entry.get("sha256"))) and type(entry["bytes"]) is int):
            raise UserError(f"{path} has an entry that is not one of a copied directory: {name[:80]}")
    return files


def _hashed(path: Path, digest: Any) -> Iterator[bytes]:
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            yield block


def _seen(local: Path) -> dict[str, Any]:
    try:
        return read_json_object(local / FETCHED, max_bytes=_MOST_BYTES)
    except (FileNotFoundError, ValueError):
        return {}


def _stamp(path: Path, entry: Entry) -> list[Any] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return [status.st_size, status.st_mtime_ns, entry["sha256"]]


def _has(path: Path, entry: Entry) -> bool:
    return path.stat().st_size == entry["bytes"] and sha256_file(path) == entry["sha256"]
