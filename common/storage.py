"""Reads and writes folders on a disk, on a shared file system or in an S3 bucket: `/folder` or `s3://BUCKET/PREFIX`.

For S3 the credentials, the region and the endpoint are configured as for the AWS tools: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY or a profile or the instance's role, AWS_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
If a process is killed during an upload, the file does not appear, but its parts are stored and billed: give the bucket
a lifecycle rule that aborts incomplete uploads. Reading needs only pyarrow, writing boto3.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pyarrow import fs

from multihop.common import s3
from multihop.common.errors import UserError
from multihop.common.files import atomic_replace, make_folder, open_regular, sync
from multihop.common.s3 import s3_filesystem

Bytes = bytes | memoryview
Kind = Literal["file", "folder", "link"]

_CHUNK = 8 * 1024**2
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of file systems without hard links."""


class _Handle(Protocol):
    def read_at(self, nbytes: int, offset: int) -> bytes: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class RandomAccessFile:
    """Reads a file by byte offset. Any number of threads may read at once."""

    def __init__(self, file: _Handle) -> None:
        self._file = file

    def __enter__(self) -> "RandomAccessFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return int(self._file.size())

    def close(self) -> None:
        """Close the file; needed only outside a `with` block."""
        self._file.close()

    def read_at(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset` on; fewer if the file ends before."""
        return self._file.read_at(length, offset)

    def chunks(self) -> Iterator[bytes]:
        """Yield the whole file in chunks of 8 MiB."""
        for offset in range(0, self.size, _CHUNK):
            yield self.read_at(offset, _CHUNK)


@dataclass(frozen=True)
class Folder:
    """Names a folder that need not exist: it is created by writing into it, and counts as empty if absent."""

    location: str
    """An absolute path or s3://BUCKET/PREFIX."""
    path: str
    """The folder's path in `filesystem`."""
    filesystem: fs.FileSystem
    polled: bool = False
    """Whether requests to a bucket fail within seconds, because the caller repeats them; for small files."""

    @property
    def is_local(self) -> bool:
        """True if it is on a disk or a shared file system, false if it is in a bucket."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def child(self, name: str) -> "Folder":
        """Return a folder in this one."""
        return Folder(f"{self.location}/{name}", f"{self.path}/{name}", self.filesystem, self.polled)

    def entries(self) -> dict[str, Kind]:
        """List the folder as sorted name -> kind.

        A link to a folder is a "link"; anything else that is not a folder is a "file".

        This takes one listing without a `stat` per entry, in a bucket one request per 1,000 entries.
        """
        if self.is_local:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as scan:
                return dict(sorted((entry.name, _kind(entry)) for entry in scan))
            return {}
        infos = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        kinds: dict[bool, Kind] = {True: "folder", False: "file"}
        return dict(sorted((info.base_name, kinds[info.type == fs.FileType.Directory]) for info in infos))

    def names(self) -> list[str]:
        """Return the sorted names of the files and folders in it."""
        return list(self.entries())

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        info = self.filesystem.get_file_info(f"{self.path}/{name}")
        return int(info.size) if info.type == fs.FileType.File else None

    def modified_at(self, name: str) -> float:
        """Return the modification time of a file, in seconds since 1970."""
        return float(self.filesystem.get_file_info(f"{self.path}/{name}").mtime.timestamp())

    def open(self, name: str) -> RandomAccessFile:
        """Open a file for positional reads.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be read; EINVAL or EISDIR: it is not a regular file, but a FIFO for example.
        """
        path = f"{self.path}/{name}"
        return RandomAccessFile(_LocalFile(path) if self.is_local else self.filesystem.open_input_file(path))

    def read_bytes(self, name: str, max_bytes: int = 2**20) -> bytes:
        """Read a small file whole; if it is larger than `max_bytes` bytes, the first `max_bytes + 1` of them.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: as `open`.
        """
        with self.open(name) as file:
            return file.read_at(0, min(file.size, max_bytes + 1))

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Stream a file: it appears, whole and synced, when this returns, and not before.

        If this or `chunks` fails, a file of that name is unchanged.
        """
        if not self.is_local:
            s3.upload(f"{self.path}/{name}", self._region, chunks)
            return
        make_folder(Path(self.path))
        with atomic_replace(Path(self.path, name)) as temporary, open(temporary, "wb") as local:
            for chunk in chunks:
                local.write(chunk)

    def write_atomically(self, name: str, data: bytes) -> None:
        """Write `data` to a file, whole or not at all."""
        if self.is_local:
            self.write(name, [data])
        else:
            s3.put(f"{self.path}/{name}", self._region, data, self.polled)

    def create(self, name: str, data: bytes, writer: str) -> bool:
        """Write `data` to a new file, unless a file of that name exists.

        Args:
            writer: makes the name of this process's temporary file unique.

        Returns:
            Whether it was written: True for at most one of any number of writers. In a bucket it may be False for all
            of them, if a response was lost: compare the content.

        Raises:
            UserError: it is in a bucket whose store does not support conditional writes.
        """
        if not self.is_local:
            return s3.create(f"{self.path}/{name}", self._region, data)
        make_folder(Path(self.path))
        path, temporary = Path(self.path, name), Path(self.path, f".{name}.{writer}.tmp")
        try:
            _write_synced(temporary, data, "wb")
            try:
                os.link(temporary, path)
            except FileExistsError:
                # NFS retries a request whose response was lost, and then finds the link that it made (open(2), O_EXCL).
                if os.stat(temporary).st_nlink == 1:
                    raise
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _write_synced(path, data, "xb")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync(Path(self.path))
        return True

    def files(self) -> list[str]:
        """List the files in it and in its folders, as sorted relative paths; in a bucket one request per 1,000."""
        infos = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True, recursive=True))
        return sorted(info.path[len(self.path) + 1 :] for info in infos if info.type == fs.FileType.File)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        if self.is_local:
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")
        else:
            s3.delete(f"{self.path}/{name}", self._region, self.polled)

    def remove_if_empty(self) -> list[str]:
        """Remove the folder if nothing is in it; returns the names of what is in it."""
        left = self.names()
        if left:
            return left
        if self.is_local:
            with suppress(FileNotFoundError):
                os.rmdir(self.path)
        else:
            s3.delete(f"{self.path}/", self._region)  # an empty object by which some tools mark a folder
        return []

    def move_to(self, other: "Folder") -> None:
        """Rename a folder of files.

        In a bucket the files are copied in reverse order of their names, and then removed in order: the manifest of a
        checkpoint, the first by name, is never in a folder that lacks other files.
        """
        if self.is_local:
            os.rename(self.path, other.path)
            return
        names = [name for name, kind in self.entries().items() if kind == "file"]
        for name in reversed(names):
            s3.copy(f"{self.path}/{name}", self._region, f"{other.path}/{name}")
        for name in names:
            self.remove(name)
        self.remove_if_empty()

    @property
    def _region(self) -> str:
        return str(self.filesystem.region)


def open_folder(location: str, key: str = "checkpoint.location", polled: bool = False) -> Folder:
    """Return the folder at an absolute or relative path, or at s3://BUCKET/PREFIX.

    Args:
        key: key or option in which the user set the location, for messages.
        polled: see `Folder.polled`.

    Raises:
        UserError: the scheme is not known, there are credentials in it, or the bucket cannot be reached.
    """
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        path = os.path.abspath(location)
        return Folder(path, path, fs.LocalFileSystem())
    path = "/".join(part for part in rest.split("/") if part)
    bucket_name = path.split("/")[0]
    if "@" in bucket_name or (":" in bucket_name and "@" in rest):
        # The whole part before the last @ is hidden: a secret key may contain slashes.
        raise UserError(
            f"{scheme}://…@{rest.rpartition('@')[2]} contains credentials, which would be saved with it; remove them "
            "and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if scheme != "s3" or not _BUCKET_NAME.fullmatch(bucket_name):
        shown = f"s3://{'…' if bucket_name else ''}" if scheme == "s3" else location
        raise UserError(f"{shown} is not a location that can be written to; give a directory or s3://BUCKET/PREFIX")
    return Folder(f"s3://{path}", path, s3_filesystem(bucket_name, key, polled), polled)


class _LocalFile:
    def __init__(self, path: str) -> None:
        self._file = open_regular(path)

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_at(self, nbytes: int, offset: int) -> bytes:
        data = os.pread(self._file.fileno(), nbytes, offset)
        parts = [data]
        while data and (nbytes := nbytes - len(data)):  # one call reads 2 GiB at most
            offset += len(data)
            parts.append(data := os.pread(self._file.fileno(), nbytes, offset))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._file.close()


def _kind(entry: "os.DirEntry[str]") -> Kind:
    if entry.is_symlink():  # the listing itself says so, without a stat per entry
        return "link" if os.path.isdir(entry.path) else "file"
    return "folder" if entry.is_dir() else "file"


def _write_synced(path: Path, data: bytes, mode: Literal["wb", "xb"]) -> None:
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
