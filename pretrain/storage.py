"""One way to use a folder on a disk, on a shared file system or in an S3 bucket: `/folder` or `s3://BUCKET/PREFIX`.

For S3 the credentials, the region and the endpoint come from where the AWS tools take them: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY or a profile or the instance's role, AWS_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
A file that was being uploaded when its process was killed is nowhere to be seen, but its parts are kept and paid for:
give the bucket a lifecycle rule that ends incomplete uploads. Reading needs pyarrow alone, writing boto3.
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

from data_prep.files import make_folder, open_regular, replacing, sync
from data_prep.reading.locations import s3_filesystem
from pretrain import bucket

Bytes = bytes | memoryview
Kind = Literal["file", "folder", "link"]

_CHUNK = 8 * 1024**2
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""What a file system says that has no second names for files."""


class _Positional(Protocol):
    def read_at(self, nbytes: int, offset: int) -> bytes: ...

    def size(self) -> int: ...

    def close(self) -> None: ...


class Source:
    """A file open for positional reads. Any number of threads may read at once."""

    def __init__(self, file: _Positional) -> None:
        self._file = file

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
        return self._file.read_at(length, offset)

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

    def entries(self) -> dict[str, Kind]:
        """What is in it, by name and sorted: a link to a folder is a link, and all else that is no folder a file."""
        if self.is_local:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.path) as found:
                return dict(sorted((entry.name, _kind(entry)) for entry in found))
            return {}
        infos = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        kinds: dict[bool, Kind] = {True: "folder", False: "file"}
        return dict(sorted((info.base_name, kinds[info.type == fs.FileType.Directory]) for info in infos))

    def names(self) -> list[str]:
        """Files and folders in it, sorted."""
        return list(self.entries())

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
            OSError: it cannot be read; with EINVAL or EISDIR it is no regular file, such as a FIFO.
        """
        path = f"{self.path}/{name}"
        return Source(_LocalFile(path) if self.is_local else self.filesystem.open_input_file(path))

    def read_bytes(self, name: str, at_most: int = 2**20) -> bytes:
        """A small file, whole; of a larger one than `at_most` bytes, that many and one more.

        Raises:
            FileNotFoundError: there is none.
            OSError: as `open`.
        """
        with self.open(name) as file:
            return file.read_at(0, min(file.size, at_most + 1))

    def write(self, name: str, chunks: Iterable[Bytes]) -> None:
        """Stream a file: it is there, whole and synced, when this returns, and not before.

        When it fails, or `chunks` does, what was there before is as it was.
        """
        if not self.is_local:
            bucket.upload(f"{self.path}/{name}", self._region, chunks)
            return
        make_folder(Path(self.path))
        with replacing(Path(self.path, name)) as temporary, open(temporary, "wb") as local:
            for chunk in chunks:
                local.write(chunk)

    def write_atomically(self, name: str, data: bytes) -> None:
        """Put `data` into a file, whole or not at all."""
        if self.is_local:
            self.write(name, [data])
        else:
            bucket.put(f"{self.path}/{name}", self._region, data)

    def create(self, name: str, data: bytes, by: str) -> bool:
        """Put `data` into a new file; whether it was put: not, where there is one of that name, and not over it.

        Of any number of writers one is told True. In a bucket nobody may be, if an answer got lost on its way: compare
        what is there.

        Args:
            by: tells the temporary file of this process from others'; stands in its name.

        Raises:
            ValueError: it is in a bucket whose store knows no conditions.
        """
        if not self.is_local:
            return bucket.create(f"{self.path}/{name}", self._region, data)
        make_folder(Path(self.path))
        path, temporary = Path(self.path, name), Path(self.path, f".{name}.{by}.tmp")
        try:
            _write_synced(temporary, data, "wb")
            try:
                os.link(temporary, path)
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

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self.is_local:
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")
        else:
            bucket.delete(f"{self.path}/{name}", self._region)

    def remove_if_empty(self) -> list[str]:
        """Remove the folder itself unless something is in it: the names of that."""
        left = self.names()
        if left:
            return left
        if self.is_local:
            with suppress(FileNotFoundError):
                os.rmdir(self.path)
        else:
            bucket.delete(f"{self.path}/", self._region)  # an empty object that some tools put for a folder
        return []

    def move_to(self, other: "Folder") -> None:
        """Give a folder of files another name.

        In a bucket its files are copied, the last one by its name first, and then removed in their order: of a
        checkpoint the manifest is the first one by its name, and exists in one place at most that is whole.
        """
        if self.is_local:
            os.rename(self.path, other.path)
            return
        names = [name for name, kind in self.entries().items() if kind == "file"]
        for name in reversed(names):
            bucket.copy(f"{self.path}/{name}", self._region, f"{other.path}/{name}")
        for name in names:
            self.remove(name)
        self.remove_if_empty()

    @property
    def _region(self) -> str:
        return str(self.filesystem.region)


def open_folder(location: str) -> Folder:
    """The folder at an absolute or relative path, or at s3://BUCKET/PREFIX.

    Raises:
        ValueError: the scheme is not known, there are credentials in it, or the bucket cannot be reached.
    """
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        path = os.path.abspath(location)
        return Folder(path, path, fs.LocalFileSystem())
    path = "/".join(part for part in rest.split("/") if part)
    bucket_name = path.split("/")[0]
    if "@" in bucket_name or (":" in bucket_name and "@" in rest):
        # Not shown, and neither is what is before it: a secret key may have slashes in it.
        raise ValueError(
            f"{scheme}://…@{rest.rpartition('@')[2]} has credentials in it, which would be written down with it; take "
            "them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if scheme != "s3" or not _BUCKET_NAME.fullmatch(bucket_name):
        shown = f"s3://{'…' if bucket_name else ''}" if scheme == "s3" else location
        raise ValueError(f"{shown} is no place for checkpoints; give a folder or s3://BUCKET/PREFIX")
    return Folder(f"s3://{path}", path, s3_filesystem(bucket_name, "checkpoint.location"))


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
    if not os.path.isdir(entry.path):
        return "file"
    return "link" if entry.is_symlink() else "folder"


def _write_synced(path: Path, data: bytes, mode: Literal["wb", "xb"]) -> None:
    with open(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
