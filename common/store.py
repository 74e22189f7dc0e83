"""What a place to keep files in can do: a disk (`disk`), a bucket (`s3`), or in tests a simulation of either."""

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

Bytes = bytes | memoryview
Kind = Literal["file", "folder", "link"]

_CHUNK = 8 * 1024**2


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


class Store(Protocol):
    """Keeps files by their paths; `storage.Folder` describes what each operation promises.

    Every operation may raise an OSError, after which it may have happened or not.
    """

    is_local: bool
    """True for a disk or a shared file system, false for a bucket."""

    def entries(self, folder: str) -> dict[str, Kind]:
        """List a folder as sorted name -> kind; empty if it does not exist."""

    def files(self, folder: str) -> list[str]:
        """List the files in a folder and in its folders, as sorted relative paths."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""

    def modified_at(self, path: str) -> float:
        """Return the modification time of a file, in seconds since 1970."""

    def open(self, path: str) -> RandomAccessFile:
        """Open a file; raises FileNotFoundError if it does not exist."""

    def write(self, path: str, chunks: Iterable[Bytes]) -> None:
        """Stream a file that appears whole."""

    def put(self, path: str, data: bytes) -> None:
        """Write a small file that appears whole."""

    def create(self, path: str, data: bytes, writer: str) -> bool:
        """Write a small file unless it exists; returns whether it was written."""

    def read(self, path: str) -> tuple[bytes, str]:
        """Read a whole file, and its version."""

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        """Write a small file if it still has a version; returns the new version, or None."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    def sync(self, folder: str) -> None:
        """Make the removals from a folder durable; else a power cut may undo them and not later ones."""

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder if it exists."""

    def move(self, folder: str, to: str) -> None:
        """Rename a folder of files."""
