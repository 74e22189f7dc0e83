"""This node's cache: `$XDG_CACHE_HOME/multihop` or `~/.cache/multihop`. What lies there may be deleted at any time that
nothing runs."""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multihop.common.errors import UserError

LIMIT = "MULTIHOP_CACHE_GB"
"""Environment variable of a node: 10^9 bytes that prepared data may take in its cache; not set: no limit."""
_USED = ".in-use"
_COPIES = ("homes/*/.prepared/*/*/.fetched.json", f"stages/*/*/*/{_USED}")


def cache_folder(*parts: str) -> Path:
    """A folder of the cache, which may not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").joinpath("multihop", *parts)


@contextmanager
def used(folder: Path) -> Iterator[None]:
    """Keep `make_room` of all processes of this machine from removing a folder for a block; it is made if need be."""
    lock = None
    while lock is None:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock_shared(folder / _USED)
    try:
        yield
    finally:
        os.close(lock)


def _lock_shared(path: Path) -> int | None:
    """The descriptor of the locked file; None: its folder was removed meanwhile."""
    with suppress(FileNotFoundError):
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == path.stat().st_ino:
                os.utime(path)
                return lock
        os.close(lock)
    return None


def prepared_copies() -> set[Path]:
    """Folders of this node's cache with data sets that were fetched, and with outputs of stages."""
    return {path.parent for pattern in _COPIES for path in cache_folder().glob(pattern)}


def make_room(folders: Iterable[Path], needed: int, files: Iterable[Path] = ()) -> None:
    """Remove folders of the cache, the one that was not used for longest first, until MULTIHOP_CACHE_GB is kept.

    Args:
        folders: that may be removed unless they are `used`.
        needed: bytes that are going to be written.
        files: of folders in use, that may be removed where this does not suffice, the first one first.

    Raises:
        UserError: that many bytes do not fit even then, or the variable is no number.
    """
    given = os.environ.get(LIMIT)
    if given is None:
        return
    try:
        limit = int(float(given) * 1e9)
    except (ValueError, OverflowError):  # int(inf) overflows
        raise UserError(f"{LIMIT}={given} in this node's environment is not a number of gigabytes") from None
    there = sorted(((_used_at(folder), folder) for folder in folders), key=lambda item: item[0])
    taken = sum(_bytes(folder) for _, folder in there)
    for _, folder in there:
        if taken + needed <= limit:
            return
        size = _bytes(folder)
        if _remove_unless_used(folder):
            taken -= size
    for file in files:
        if taken + needed <= limit:
            return
        with suppress(FileNotFoundError):  # another run may have removed it
            taken -= file.stat().st_size
            file.unlink()
    if taken + needed > limit:
        raise UserError(
            f"{LIMIT}={given} in this node's environment leaves no room for {needed / 1e9:.1f} GB of prepared data "
            f"beside the {taken / 1e9:.1f} GB in use; raise it"
        )


def _remove_unless_used(folder: Path) -> bool:
    with suppress(FileNotFoundError), open(folder / _USED, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(folder)
    return True


def _used_at(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return (folder / _USED).stat().st_mtime
    return 0.0


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
