"""Reads and writes folders on a disk, on a shared file system or in an S3 bucket: `/folder` or `s3://BUCKET/PREFIX`.

For S3 the credentials, the region and the endpoint are configured as for the AWS tools: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY or a profile or the instance's role, AWS_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
If a process is killed during an upload, the file does not appear, but its parts are stored and billed: give the bucket
a lifecycle rule that aborts incomplete uploads. Reading needs only pyarrow, writing boto3.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from multihop.common.disk import Disk
from multihop.common.errors import UserError
from multihop.common.s3 import connect
from multihop.common.store import Bytes, Kind, RandomAccessFile, Store

_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Folder:
    """Names a folder that need not exist: it is created by writing into it, and counts as empty if absent."""

    location: str
    """An absolute path or s3://BUCKET/PREFIX."""
    path: str
    """The folder's path in `store`."""
    store: Store

    @property
    def is_local(self) -> bool:
        """True if it is on a disk or a shared file system, false if it is in a bucket."""
        return self.store.is_local

    def child(self, name: str) -> "Folder":
        """Return a folder in this one."""
        return Folder(f"{self.location}/{name}", f"{self.path}/{name}", self.store)

    def entries(self) -> dict[str, Kind]:
        """List the folder as sorted name -> kind.

        A link to a folder is a "link"; anything else that is not a folder is a "file".

        This takes one listing without a `stat` per entry, in a bucket one request per 1,000 entries.
        """
        return self.store.entries(self.path)

    def names(self) -> list[str]:
        """Return the sorted names of the files and folders in it."""
        return list(self.entries())

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        return self.store.size(f"{self.path}/{name}")

    def modified_at(self, name: str) -> float:
        """Return the modification time of a file, in seconds since 1970."""
        return self.store.modified_at(f"{self.path}/{name}")

    def open(self, name: str) -> RandomAccessFile:
        """Open a file for positional reads.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be read; EINVAL or EISDIR: it is not a regular file, but a FIFO for example.
        """
        return self.store.open(f"{self.path}/{name}")

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
        self.store.write(f"{self.path}/{name}", chunks)

    def write_atomically(self, name: str, data: bytes) -> None:
        """Write `data` to a file, whole or not at all."""
        self.store.put(f"{self.path}/{name}", data)

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
        return self.store.create(f"{self.path}/{name}", data, writer)

    def read(self, name: str) -> tuple[bytes, str]:
        """Read a whole file, and its version: what `replace` compares.

        Raises:
            FileNotFoundError: the file does not exist.
        """
        return self.store.read(f"{self.path}/{name}")

    def replace(self, name: str, data: bytes, version: str | None) -> str | None:
        """Write `data` to a small file, unless another write came between.

        A process that was suspended, or whose request arrives late, replaces nothing newer in this way.

        Args:
            version: the version of the file that was read or written last; None: the file did not exist.

        Returns:
            The file's new version; None: its version is another one, and nothing was written.

        Raises:
            UserError: it is in a bucket whose store does not support conditional writes.
        """
        return self.store.replace(f"{self.path}/{name}", data, version)

    def files(self) -> list[str]:
        """List the files in it and in its folders, as sorted relative paths; in a bucket one request per 1,000."""
        return self.store.files(self.path)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        self.store.remove(f"{self.path}/{name}")

    def sync(self) -> None:
        """Make the removals from it durable; else a power cut may undo them and not later ones."""
        self.store.sync(self.path)

    def remove_if_empty(self) -> list[str]:
        """Remove the folder if nothing is in it; returns the names of what is in it."""
        left = self.names()
        if not left:
            self.store.remove_folder(self.path)
        return left

    def move_to(self, other: "Folder") -> None:
        """Rename a folder of files.

        In a bucket the files are copied in reverse order of their names, and then removed in order: the manifest of a
        checkpoint, the first by name, is never in a folder that lacks other files.
        """
        self.store.move(self.path, other.path)


def open_folder(location: str, key: str = "checkpoint.location", polled: bool = False) -> Folder:
    """Return the folder at an absolute or relative path, or at s3://BUCKET/PREFIX.

    Args:
        key: key or option in which the user set the location, for messages.
        polled: whether requests to a bucket fail within seconds, because the caller repeats them; for small files.

    Raises:
        UserError: the scheme is not known, there are credentials in it, or the bucket cannot be reached.
    """
    scheme, separator, rest = str(location).partition("://")
    if not separator:
        path = os.path.abspath(location)
        return Folder(path, path, Disk())
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
    return Folder(f"s3://{path}", path, connect(bucket_name, key, polled))
