"""Reads an input file up to its size when it was listed; separates failed access from bad bytes.

Libraries raise OSError for both, so an error of access is recorded below the library, where it occurs.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from multihop.data_prep.reading.errors import ChangedError, ReadFailed, UnreadableFileError
from multihop.data_prep.reading.identities import UNREADABLE, has_changed, is_identified_by_content
from multihop.data_prep.reading.locations import access_error, block_bytes, is_remote, open_location
from multihop.data_prep.reading.sources import InputFile


class FileReader:
    """Reads the first `file.size` bytes of a file: by position, in blocks, or as a stream."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._failure: Exception | None = None
        self.max_offset = 0
        """Offset after the last byte that was read."""
        self._digest = hashlib.sha256() if is_identified_by_content(file) else None
        """SHA-256 of the first `_hashed` bytes; `_hashed` is -1 if they were not read in order."""
        self._hashed = 0
        try:
            self._handle = open_location(file.path, file.identity)
        except ReadFailed:
            raise
        except ChangedError:
            raise _changed_error() from None
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise UnreadableFileError(f"cannot be opened ({reason})", transient=True) from None

    def __enter__(self) -> "FileReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; a recorded error of access takes precedence over what a library made of it."""
        self._handle.close()
        if self._failure is not None and not isinstance(error, GeneratorExit):
            raise self._failure from None

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Read up to `nbytes` bytes from `offset` on; empty only at the end of the file.

        Raises:
            ReadFailed: a server does not answer.
            UnreadableFileError: the file is shorter than it was, or cannot be read.
        """
        nbytes = min(nbytes, self._file.size - offset)
        if nbytes <= 0:
            return b""
        try:
            data = self._handle.read_at(nbytes, offset)
        except ReadFailed as error:
            self._failure = error
            raise
        except OSError as error:
            self._failure = _classify(self._file.path, error)
            raise self._failure from None
        if not data:
            self._failure = _changed_error()
            raise self._failure
        self.max_offset = max(self.max_offset, offset + len(data))
        if self._digest is not None:
            self._hash(data, offset)
        return data

    def blocks(self, start: int) -> Iterator[bytes]:
        """Yield the bytes from `start` on, in blocks of the location's block size."""
        while block := self.read_at(block_bytes(self._file.path), start):
            start += len(block)
            yield block

    def stream(self) -> io.BufferedReader:
        """Return a seekable stream, for libraries."""
        return io.BufferedReader(_Stream(self, self._file.size), block_bytes(self._file.path))

    def check_unchanged(self) -> None:
        """Check at the end that the bytes that were listed have not changed.

        Raises:
            UnreadableFileError: they have.
        """
        if self._digest is not None and self._hashed == self._file.size:
            is_changed = self._digest.hexdigest() != self._file.identity
        else:
            is_changed = self._file.identity == UNREADABLE or has_changed(self._file)
        if is_changed:
            raise _changed_error()

    def _hash(self, data: bytes, offset: int) -> None:
        if offset == 0:
            self._digest, self._hashed = hashlib.sha256(), 0
        if self._digest is None or offset != self._hashed:
            self._hashed = -1
            return
        self._digest.update(data)
        self._hashed += len(data)


class _Stream(io.RawIOBase):
    """Streams a `FileReader`; closing it does not close the file."""

    def __init__(self, reader: FileReader, size: int) -> None:
        self._reader = reader
        self._size = size
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        data = self._reader.read_at(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _changed_error() -> UnreadableFileError:
    return UnreadableFileError("changed while being read", transient=True)


def _classify(path: str, error: OSError) -> Exception:
    if isinstance(error, FileNotFoundError | ChangedError):
        return _changed_error()
    cause = access_error(path, error) if is_remote(path) else error
    if isinstance(cause, ReadFailed):
        return cause
    return UnreadableFileError(f"cannot be read ({cause.strerror})", transient=True)
