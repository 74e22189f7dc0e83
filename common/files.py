"""Atomic writes, hashes of files, canonical JSON, and checked reading of files that others wrote."""

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from multihop.common.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""`OSError.errno` when the disk is full or the user's quota is exceeded."""
MAX_TEXT_BYTES = 2**20
_BLOCK = 64 * 2**10
MAX_JSON_BYTES = 8 * 2**20
"""Parsing takes up to 24 times the size of a JSON file."""
_MAX_JSON_DEPTH = 64
"""Far more than our files have, and far less than Python's recursion limit."""


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading; refuses others, since a FIFO would block and /dev/zero would never end.

    Raises:
        OSError: as `open`; errno is EINVAL and `strerror` "not a regular file" for anything but a regular file.
    """
    # Without O_NONBLOCK opening a FIFO blocks until somebody writes into it. It has no effect on regular files.
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
    """Return the SHA-256 of a regular file's bytes, as 64 hex digits; reads it in blocks.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json_object(
    path: Path, *, advice: str = "restore it from a copy", max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Read a JSON object nested at most 64 deep, with integers of at most 64 bits.

    Args:
        advice: what the user should do about an invalid file, as the end of a sentence.
        max_bytes: limit of the file's size.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: the file, which the message names, holds anything but such an object, is too large, or is not a
            regular file.
    """
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} is not a JSON object (it cannot be read: {error.strerror}); {advice}") from None
    return json_object(data, path, advice=advice, max_bytes=max_bytes)


def json_object(
    data: bytes, path: str | Path, *, advice: str = "restore it from a copy", max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """Parse a file's bytes as `read_json_object` does; a caller need not read more than `max_bytes` + 1 of them.

    Raises:
        UserError: as `read_json_object`.
    """

    def not_an_object(why: str) -> UserError:
        return UserError(f"{path} is not a JSON object ({why}); {advice}")

    if len(data) > max_bytes:
        raise not_an_object(f"it has more than {max_bytes:,} bytes")
    if not data.strip(b" \t\r\n\0"):
        raise not_an_object("it is empty" if not data.strip() else "it holds nothing but NUL bytes")
    try:
        content = json.loads(data.decode(), parse_int=_int64)
    except UnicodeDecodeError as error:
        raise not_an_object(f"byte {error.start:,} is not UTF-8") from None
    except ValueError as error:
        raise not_an_object(str(error)) from None
    except RecursionError:
        raise not_an_object(f"its lists and objects are more than {_MAX_JSON_DEPTH} deep") from None
    if not isinstance(content, dict):
        kind = {list: "list", str: "string", bool: "truth value", type(None): "null"}.get(type(content), "number")
        raise not_an_object(f"it holds a {kind}")
    if _is_deep(content):
        raise not_an_object(f"its lists and objects are more than {_MAX_JSON_DEPTH} deep")
    return content


def _int64(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= number < 2**64:
        raise UserError("it has an integer of more than 64 bits")
    return number


def _is_deep(content: dict[str, Any]) -> bool:
    level: list[Any] = [content]
    for _ in range(_MAX_JSON_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def read_user_text(path: Path, name: str, what: str) -> str:
    """Read a small text file that a user named: a recipe, a DeepSpeed configuration.

    Args:
        name: the beginning of messages: the path, or the recipe's key with the path.
        what: the expected content, for instance "a recipe".

    Raises:
        UserError: the file does not exist, is not a regular file, is longer than 1 MiB, cannot be read, or is not
            UTF-8.
    """
    try:
        with open_regular(path) as file:  # opening a pipe would block
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist; give the path of {what}") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a directory; give the path of {what}") from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UserError(f"{name} is a pipe or a device; write {what} into a file and give its path") from None
        raise UserError(f"{name} cannot be read ({error.strerror}); give the path of {what}") from None
    if len(content) > MAX_TEXT_BYTES:
        raise UserError(f"{name} is longer than {MAX_TEXT_BYTES:,} bytes; give the path of {what}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None


def sha256_json(obj: Any) -> str:
    """Return the SHA-256 of an object's canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical_json(obj)).hexdigest()


def canonical_json(obj: Any) -> bytes:
    """Encode a JSON value with sorted keys, without whitespace and NaN, in UTF-8: equal values give equal bytes."""
    text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents, and sync each parent, so that a power cut does not lose the directory.

    Args:
        mode: mode of the directory itself, less the umask; parents get the default mode.

    Raises:
        FileExistsError: the path is not a directory.
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
    """Sync a file, or a directory's entries, without which a new file would be lost despite its synced content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is synced and renamed to `path` after the block, or removed if the block raises.

    Readers of `path` see the old file or the whole new one, also after a power cut. A link at `path` is replaced; its
    target is not touched.

    Raises:
        OSError: the disk is full; the error has the path, which Arrow's errors lack.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with add_path_to_disk_full_error(path):
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def add_path_to_disk_full_error(path: Path) -> Iterator[None]:
    """Add the path to an OSError of the block about a full disk or an exceeded quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def remove_temporaries(folder: Path, of: str | None = None) -> None:
    """Remove temporary files of `atomic_replace` left by killed processes; nobody else may write into the directory.

    Args:
        of: name of the file whose temporaries are removed; None: of all files.
    """
    for path in folder.glob(".*.tmp" if of is None else f".{escape(of)}.*.tmp"):
        path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write `data` to `path` atomically, with `mode` less the umask; the directory must exist."""
    with (
        atomic_replace(path) as temporary,
        open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file,
    ):
        file.write(data)


def open_append(path: Path) -> BinaryIO:
    """Open a file for appending, creating it if needed; its directory must exist.

    Raises:
        UserError: as `check_not_link`.
    """
    file = BufferedWriter(FileIO(path, "ab", opener=_open_own))
    if file.tell() == 0:  # possibly just created
        sync(path.parent)
    return file


def append_bytes(path: Path, data: bytes) -> int:
    """Append all of `data` to a file and sync it, or nothing; returns the offset at which it begins.

    Raises:
        UserError: as `check_not_link`.
    """
    with add_path_to_disk_full_error(path), open_append(path) as file:
        offset = file.tell()
        try:
            left = memoryview(data)
            while left:  # not through the buffer, which would retry its rest on close
                left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())
        except OSError:
            os.truncate(file.fileno(), offset)
            raise
    return offset


def check_not_link(path: Path) -> None:
    """Refuse to write into anything but a regular file: in a directory from somebody else a link could lead anywhere.

    Raises:
        UserError: the path is a link, a FIFO, a directory or the like.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UserError(
            f"{path} is a link or not a regular file, and is not written to; remove it and rerun the same command"
        )


def truncate_torn_line(path: Path) -> None:
    """Remove an incomplete last line left by a crash, so that the next append starts a new line.

    Raises:
        UserError: as `check_not_link`.
    """
    if not path.exists():
        return
    with open(path, "rb+", opener=_open_own) as file:
        end = last_line_end(file)
        if end < file.seek(0, os.SEEK_END):
            file.truncate(end)
            os.fsync(file.fileno())


def last_line_end(file: BinaryIO) -> int:
    """Return the offset after the last complete line; reads the file from its end."""
    start = file.seek(0, os.SEEK_END)
    while start > 0:
        length = min(_BLOCK, start)
        start -= length
        file.seek(start)
        newline = file.read(length).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


def _open_own(path: str, flags: int) -> int:
    """Return an opener for writing that also refuses a link created after the check."""
    check_not_link(Path(path))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
