"""One way to use a folder on a disk, on a shared file system or in an S3 bucket: `/folder` or `s3://BUCKET/PREFIX`.

For S3 the credentials, the region and the endpoint come from where the AWS tools take them: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY or a profile or the instance's role, AWS_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
A file that was being uploaded when its process was killed is nowhere to be seen, but its parts are kept and paid for:
give the bucket a lifecycle rule that ends incomplete uploads.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pyarrow import fs, py_buffer

from data_prep.files import replacing
from data_prep.reading.locations import s3_filesystem

Bytes = bytes | memoryview

_CHUNK = 8 * 1024**2
_UPLOAD_AHEAD = 256 * 1024**2
"""Bytes that may wait for their upload: as many are held in memory once more."""


class Sink(Protocol):
    """Where a file's bytes go, in order."""

    def write(self, data: Bytes, /) -> object:
        """Append `data`."""


class Source:
    """A file open for positional reads. Any number of threads may read at once."""

    def __init__(self, filesystem: fs.FileSystem, path: str) -> None:
        self._file = filesystem.open_input_file(path)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def size(self) -> int:
        """In bytes."""
        return int(self._file.size())

    def read_at(self, offset: int, length: int) -> bytes:
        """`length` bytes from `offset` on; fewer where the file ends before."""
        data: bytes = self._file.read_at(length, offset)
        return data

    def chunks(self) -> Iterator[bytes]:
        """The whole file in pieces of 8 MiB."""
        for offset in range(0, self.size, _CHUNK):
            yield self.read_at(offset, _CHUNK)


@dataclass(frozen=True)
class Folder:
    """A folder that need not exist: writing into it makes it, and an absent one is empty."""

    location: str
    """As the user would write it: an absolute path or s3://BUCKET/PREFIX."""
    path: str
    """What `filesystem` calls it."""
    filesystem: fs.FileSystem

    @property
    def is_local(self) -> bool:
        """On a disk or a shared file system, not in a bucket."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    def child(self, name: str) -> "Folder":
        """A folder in this one."""
        return Folder(f"{self.location}/{name}", f"{self.path}/{name}", self.filesystem)

    def names(self) -> list[str]:
        """Files and folders in it, sorted."""
        found = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return sorted(info.base_name for info in found)

    def size(self, name: str) -> int | None:
        """Bytes of a file; None: there is no such file."""
        info = self.filesystem.get_file_info(f"{self.path}/{name}")
        return int(info.size) if info.type == fs.FileType.File else None

    def changed_at(self, name: str) -> float:
        """When a file was last written, in seconds since 1970."""
        return float(self.filesystem.get_file_info(f"{self.path}/{name}").mtime.timestamp())

    def open(self, name: str) -> Source:
        """A file for positional reads.

        Raises:
            FileNotFoundError: there is none.
        """
        return Source(self.filesystem, f"{self.path}/{name}")

    def read_bytes(self, name: str) -> bytes:
        """A small file, whole.

        Raises:
            FileNotFoundError: there is none.
        """
        with self.open(name) as file:
            return file.read_at(0, file.size)

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        """Stream a file: it is there, whole and synced, when the block has ended well, and not before.

        When the block fails there is no such file on S3, and on a disk the one that was there before.
        """
        if self.is_local:
            _make_folder(self.path)
            with replacing(Path(self.path, name)) as temporary, open(temporary, "wb") as local:
                yield local
            return
        stream = self.filesystem.open_output_stream(f"{self.path}/{name}")
        try:
            yield _Uploading(stream)
            stream.close()  # an upload becomes visible here, all at once
        except BaseException:
            # pyarrow cannot abandon an upload: ended and removed, which nothing names so far.
            with suppress(OSError):
                stream.close()
                self.remove(name)
            raise

    def write_atomically(self, name: str, data: bytes) -> None:
        """Put `data` into a file, whole or not at all."""
        with self.writing(name) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(f"{self.path}/{name}")

    def remove_tree(self) -> None:
        """Remove the folder with all that is in it, if it is there."""
        if self.is_local:
            with suppress(FileNotFoundError):
                shutil.rmtree(self.path)
        else:
            with suppress(FileNotFoundError):
                self.filesystem.delete_dir(self.path)

    def move_to(self, other: "Folder") -> None:
        """Give a folder of files another name. A bucket has no such thing: there its files are written again."""
        if self.is_local:
            os.rename(self.path, other.path)
            return
        for name in self.names():
            with self.open(name) as old, other.writing(name) as new:
                for chunk in old.chunks():
                    new.write(chunk)
        self.remove_tree()


def open_folder(location: str) -> Folder:
    """The folder at an absolute or relative path, or at s3://BUCKET/PREFIX.

    Raises:
        ValueError: the scheme is not known, or the bucket cannot be reached.
    """
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        path = os.path.abspath(location)
        return Folder(path, path, fs.LocalFileSystem())
    if scheme != "s3" or not rest.strip("/"):
        raise ValueError(f"{location} is no place for checkpoints; give a folder or s3://BUCKET/PREFIX")
    path = "/".join(part for part in rest.split("/") if part)
    return Folder(f"s3://{path}", path, s3_filesystem(path.split("/")[0], "checkpoint.location"))


def _make_folder(path: str) -> None:
    """Made with those above it, each of them synced: a file in it is not lost to a power cut through its folder."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_folder(above)
    with suppress(FileExistsError):
        os.mkdir(path)
    descriptor = os.open(above, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Uploading:
    """Parts are sent in the background; too many that wait would be a second copy of the file in memory."""

    def __init__(self, stream: object) -> None:
        self._stream = stream
        self._ahead = 0

    def write(self, data: Bytes) -> None:
        self._stream.write(py_buffer(data))  # type: ignore[attr-defined]
        self._ahead += memoryview(data).nbytes
        if self._ahead >= _UPLOAD_AHEAD:
            self._stream.flush()  # type: ignore[attr-defined]
            self._ahead = 0
