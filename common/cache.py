"""Manages this node's cache: `$XDG_CACHE_HOME/multihop` or `~/.cache/multihop`.

Anything in it may be deleted while nothing runs.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from multihop.common.errors import UserError

LIMIT = "MULTIHOP_CACHE_GB"
"""Environment variable with the size of the prepared data in a node's cache, in 10^9 bytes; not set: no limit."""
_PINNED_FILE = ".in-use"
_COPIES = ("remote-runs/*/.prepared/*/*/.fetched.json", f"stages/*/*/*/{_PINNED_FILE}")


def cache_folder(*parts: str) -> Path:
    """Return a folder of the cache, which may not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("multihop", *parts)


@contextmanager
def pin(folder: Path) -> Iterator[None]:
    """Create a folder if need be, and protect it from `evict_until_fits` of all processes of this machine."""
    lock = None
    while lock is None:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock_shared(folder / _PINNED_FILE)
    try:
        yield
    finally:
        os.close(lock)


def _lock_shared(path: Path) -> int | None:
    """Return the descriptor of the locked file; None if its folder was removed meanwhile."""
    with suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == path.stat().st_ino:
                os.utime(path)
                return lock
        os.close(lock)
    return None


def evictable_folders() -> set[Path]:
    """Return the folders of this node's cache with fetched data sets and with outputs of stages."""
    return {path.parent for pattern in _COPIES for path in cache_folder().glob(pattern)}


def evict_until_fits(folders: Iterable[Path], needed: int, files: Iterable[Path] = ()) -> None:
    """Remove folders of the cache, the least recently used first, until the others and `needed` bytes fit into
    MULTIHOP_CACHE_GB.

    Args:
        folders: folders that may be removed unless a process has pinned them.
        needed: bytes that are going to be written.
        files: files of pinned folders that may be removed, in this order, if that does not suffice.

    Raises:
        UserError: that many bytes do not fit even then, or the variable is not a number.
    """
    setting = os.environ.get(LIMIT)
    if setting is None:
        return
    try:
        limit = int(float(setting) * 1e9)
    except (ValueError, OverflowError):  # int(inf) overflows
        raise UserError(f"{LIMIT}={setting} in this node's environment is not a number of gigabytes") from None
    by_age = sorted(((_last_used(folder), folder) for folder in folders), key=lambda item: item[0])
    taken = sum(_bytes(folder) for _, folder in by_age)
    for _, folder in by_age:
        if taken + needed <= limit:
            return
        size = _bytes(folder)
        if _remove_unless_pinned(folder):
            taken -= size
    for file in files:
        if taken + needed <= limit:
            return
        with suppress(FileNotFoundError):  # another run may have removed it
            taken -= file.stat().st_size
            file.unlink()
    if taken + needed > limit:
        raise UserError(
            f"{LIMIT}={setting} in this node's environment leaves no room for {needed / 1e9:.1f} GB of prepared data "
            f"beside the {taken / 1e9:.1f} GB in use; raise it"
        )


def _remove_unless_pinned(folder: Path) -> bool:
    with suppress(FileNotFoundError), open(folder / _PINNED_FILE, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Renamed first: a process that pins the folder meanwhile creates a new one.
        removed = folder.with_name(f".{folder.name}.{uuid4().hex}")
        os.rename(folder, removed)
        shutil.rmtree(removed)
    return True


def _last_used(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return (folder / _PINNED_FILE).stat().st_mtime
    return 0.0


def _bytes(folder: Path) -> int:
    with suppress(FileNotFoundError):  # another process may be removing it
        return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return 0
