"""A disk or a shared file system as a store: what was written is synced, and appears whole."""

import errno
import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from filelock import FileLock

from multihop.common.files import atomic_replace, make_folder, open_regular, sync
from multihop.common.store import Bytes, Kind, RandomAccessFile

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""The errors of file systems without hard links."""


class Disk:
    """`Store` of absolute paths."""

    is_local = True

    def entries(self, folder: str) -> dict[str, Kind]:
        """List a folder without a `stat` per entry."""
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as scan:
            return dict(sorted((entry.name, _kind(entry)) for entry in scan))
        return {}

    def files(self, folder: str) -> list[str]:
        """List the files below a folder."""
        paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
        return sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())

    def size(self, path: str) -> int | None:
        """Return the size of a file."""
        return os.path.getsize(path) if os.path.isfile(path) else None

    def modified_at(self, path: str) -> float:
        """Return the modification time of a file."""
        return os.path.getmtime(path)

    def open(self, path: str) -> RandomAccessFile:
        """Open a regular file."""
        return RandomAccessFile(_LocalFile(path))

    def write(self, path: str, chunks: Iterable[Bytes]) -> None:
        """Write a temporary file, sync and rename it."""
        make_folder(Path(path).parent)
        with atomic_replace(Path(path)) as temporary, open(temporary, "wb") as local:
            for chunk in chunks:
                local.write(chunk)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file as `write` does."""
        self.write(path, [data])

    def create(self, path: str, data: bytes, writer: str) -> bool:
        """Write a temporary file, sync it, and make a link to it, which fails if the path exists."""
        make_folder(Path(path).parent)
        temporary = Path(path).with_name(f".{Path(path).name}.{writer}.tmp")
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
                _write_synced(Path(path), data, "xb")
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        sync(Path(path).parent)
        return True

    def read(self, path: str) -> tuple[bytes, str]:
        """Read a file; its hash is its version."""
        with open_regular(path) as file:
            data = file.read()
        return data, hashlib.sha256(data).hexdigest()

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        """Write a file as `write` does, while a lock beside it keeps off others that replace it."""
        folder, name = os.path.split(path)
        make_folder(Path(folder))
        with FileLock(f"{folder}/.{name}.lock"):
            if (self.read(path)[1] if os.path.exists(path) else None) != version:
                return None
            self.put(path, data)
        return hashlib.sha256(data).hexdigest()

    def remove(self, path: str) -> None:
        """Remove a file."""
        with suppress(FileNotFoundError):
            os.unlink(path)

    def sync(self, folder: str) -> None:
        """Sync the entries of a folder, if it exists."""
        with suppress(FileNotFoundError):
            sync(Path(folder))

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder."""
        with suppress(FileNotFoundError):
            os.rmdir(path)

    def move(self, folder: str, to: str) -> None:
        """Rename a folder."""
        os.rename(folder, to)


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
