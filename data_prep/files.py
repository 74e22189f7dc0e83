"""Files that are either whole or absent, their hashes, and JSON with one spelling."""

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits; reads it in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(obj: Any) -> str:
    """SHA-256 of an object's canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def canonical_json(obj: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no blanks, UTF-8, no NaN. The same object, the same bytes."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: synced and renamed to it when the block ends well, removed when it does not.

    Whoever looks at `path` sees the old file or the whole new one, also after a power cut.

    Raises OSError with the path where the disk is full, which Arrow's own does not name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_temporaries(folder: Path) -> None:
    """Remove what killed processes left of `replacing` in a folder into which nobody writes now."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Put `data` at `path`, whole or not at all, with `mode` less the umask; the folder must exist."""
    with (
        replacing(path) as temporary,
        open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(data)


def cut_torn_line(path: Path) -> None:
    """Remove what a crash left of a last line, so that the next one appended is a line of its own."""
    if path.exists():
        with open(path, "rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
