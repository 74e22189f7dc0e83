"""Files that are either whole or absent, their hashes, and JSON with one spelling."""

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What `OSError.errno` says where there is no room, or none of the user's share is left."""
_BLOCK = 64 * 2**10
_JSON_BYTES = 8 * 2**20
"""Parsed, the worst of a JSON file takes 24 times its size."""
_JSON_DEPTH = 64
"""Far more than any file of ours has, and far less than what Python's recursion stands."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a file for reading. What is no regular file is refused: a FIFO would wait, /dev/zero would never end.

    Raises:
        OSError: as `open`; with `strerror` "not a regular file" and EINVAL where it is none.
    """
    # Without O_NONBLOCK a FIFO is not even opened before somebody writes into it. It means nothing to regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def sha256_file(path: str | Path) -> str:
    """SHA-256 of a regular file's bytes, as 64 hex digits; reads it in pieces. Raises OSError as `open_regular`."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json_object(
    path: Path, *, advice: str = "restore it from a copy", most_bytes: int = _JSON_BYTES
) -> dict[str, Any]:
    """The object in a JSON file, whose lists and objects are at most 64 deep and whose whole numbers have 64 bits.

    Args:
        advice: what the user is to do about a file that holds none, as the end of a sentence.
        most_bytes: of the file.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: it holds anything else (nothing, half an object, other bytes, a list), or is no regular file or
            too large; the file is named.
    """
    try:
        with open_regular(path) as file:
            data = file.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} is not a JSON object (it cannot be read: {error.strerror}); {advice}") from None
    return json_object(data, path, advice=advice, most_bytes=most_bytes)


def json_object(
    data: bytes, path: str | Path, *, advice: str = "restore it from a copy", most_bytes: int = _JSON_BYTES
) -> dict[str, Any]:
    """`read_json_object` of what was read of a file, one byte more than `most_bytes` where it has more.

    Raises:
        ValueError: as there.
    """

    def refused(why: str) -> ValueError:
        return ValueError(f"{path} is not a JSON object ({why}); {advice}")

    if len(data) > most_bytes:
        raise refused(f"it has more than {most_bytes:,} bytes")
    if not data.strip(b" \t\r\n\0"):
        raise refused("it is empty" if not data.strip() else "it holds nothing but NUL bytes")
    try:
        content = json.loads(data.decode(), parse_int=_int64)
    except UnicodeDecodeError as error:
        raise refused(f"byte {error.start:,} is not UTF-8") from None
    except ValueError as error:
        raise refused(str(error)) from None
    except RecursionError:
        raise refused(f"its lists and objects are more than {_JSON_DEPTH} deep") from None
    if not isinstance(content, dict):
        kind = {list: "list", str: "string", bool: "truth value", type(None): "null"}.get(type(content), "number")
        raise refused(f"it holds a {kind}")
    if _is_deep(content):
        raise refused(f"its lists and objects are more than {_JSON_DEPTH} deep")
    return content


def _int64(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= number < 2**64:
        raise ValueError("a whole number in it has more than 64 bits")
    return number


def _is_deep(content: dict[str, Any]) -> bool:
    level: list[Any] = [content]
    for _ in range(_JSON_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def sha256_json(obj: Any) -> str:
    """SHA-256 of an object's canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def canonical_json(obj: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no blanks, UTF-8, no NaN. The same object, the same bytes."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder and those above it, each synced into the one above: a power cut takes no file with its folder.

    Args:
        mode: of the folder itself, less the umask; those above it are made as usual.

    Raises:
        FileExistsError: something else stands there.
    """
    path = path.absolute()
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder: a new file's content alone would be lost with its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`: synced and renamed to it when the block ends well, removed when it does not.

    Whoever looks at `path` sees the old file or the whole new one, also after a power cut. A link at `path` is
    replaced, and what it points to stays as it is.

    Raises OSError with the path where the disk is full, which Arrow's own does not name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with naming(path):
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Where the disk or the user's share of it is full, the OSError of the block gets the name of what was written."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


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


def open_append(path: Path) -> BinaryIO:
    """Open a file to append to it, made where there is none; its folder must exist.

    Raises:
        ValueError: as `check_own`.
    """
    file = BufferedWriter(FileIO(path, "ab", opener=_open_own))
    if file.tell() == 0:  # perhaps made just now
        sync(path.parent)
    return file


def check_own(path: Path) -> None:
    """Refuse to write into what is no regular file: in a folder from somebody else a link could lead anywhere.

    Raises:
        ValueError: a link, a FIFO, a folder or the like stands there.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(
            f"{path} is a link or no regular file, and is not written into; remove it and give the same command again"
        )


def cut_torn_line(path: Path) -> None:
    """Remove what a crash left of a last line, so that the next one appended is a line of its own.

    Raises:
        ValueError: as `check_own`.
    """
    if not path.exists():
        return
    with open(path, "rb+", opener=_open_own) as file:
        end = end_of_lines(file)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)
            os.fsync(file.fileno())


def end_of_lines(file: BinaryIO) -> int:
    """The offset behind the last whole line; reads the file from its end."""
    start = file.seek(0, os.SEEK_END)
    while start > 0:
        length = min(_BLOCK, start)
        start -= length
        file.seek(start)
        found = file.read(length).rfind(b"\n")
        if found >= 0:
            return start + found + 1
    return 0


def _open_own(path: str, flags: int) -> int:
    """What opens a file to write into it: a link that comes to stand there after it was looked at is not followed."""
    check_own(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
