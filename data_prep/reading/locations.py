"""Opens a location: a local path, s3://, gs://, http(s):// or any other protocol of fsspec.

Credentials come from where each provider's own tools read them. For S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or
a profile or the instance role, AWS_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; for gs: Google's application
default credentials, or STORAGE_EMULATOR_HOST.
"""

import os
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from pyarrow import fs

from multihop.common.errors import UserError
from multihop.common.s3 import error_reason, s3_filesystem
from multihop.data_prep.reading.errors import ReadFailed
from multihop.data_prep.reading.http import HttpFile, describe, is_http

_GS_RETRY_TIME = timedelta(seconds=60)


class RandomAccessFile(Protocol):
    """Reads an open file by position."""

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Read up to `nbytes` bytes from `offset` on; fewer at the end of the file."""

    def close(self) -> None:
        """Close the file."""


def is_remote(location: str) -> bool:
    """Return whether it is a URL, not a local path."""
    return "://" in location


def block_bytes(location: str) -> int:
    """Return the number of bytes to read at once: a remote block is a request, with its latency."""
    return 8 * 2**20 if is_remote(location) else 2**20


def open_location(location: str, identity: str = "") -> RandomAccessFile:
    """Open a file.

    Args:
        identity: version that a file on a web server must have, from `identities.content_identity`; "" accepts any.

    Raises:
        OSError: a local file cannot be opened.
        FileNotFoundError, PermissionError, ChangedError, ReadFailed: a remote file cannot be opened.
    """
    if not is_remote(location):
        return _LocalFile(location)
    if is_http(location):
        return HttpFile(location, identity)
    filesystem, path = filesystem_for(location)
    try:
        return filesystem.open_input_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise access_error(location, error) from None


def version_of(location: str) -> tuple[int, int, str]:
    """Return size, modification time in ns (0: unknown), and the version of a remote file ("": unknown).

    Raises:
        OSError: as `open_location`.
    """
    if is_http(location):
        about = describe(location)
        return about.size, about.mtime_ns, about.version
    if not is_remote(location):
        status = os.stat(location)
        return status.st_size, status.st_mtime_ns, ""
    filesystem, path = filesystem_for(location)
    try:
        if isinstance(filesystem, fs.S3FileSystem | fs.GcsFileSystem):
            with filesystem.open_input_file(path) as file:
                etag = {str(key).lower(): value for key, value in (file.metadata() or {}).items()}.get("etag")
                if etag:
                    return file.size(), 0, f"etag {etag.decode()}"
        info = filesystem.get_file_info(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise access_error(location, error) from None
    if info.type != fs.FileType.File:
        raise FileNotFoundError(2, "No such file or directory", location)
    return info.size, info.mtime_ns or 0, f"changed {info.mtime_ns}" if info.mtime_ns else ""


def filesystem_for(location: str, key: str = "the location") -> tuple[fs.FileSystem, str]:
    """Return the file system of a URL other than HTTP, and the path in it.

    Raises:
        UserError: the protocol is unknown or the bucket cannot be reached; the message names the recipe's `key`.
    """
    protocol, _, rest = location.partition("://")
    path = "/".join(part for part in rest.split("/") if part)
    if protocol == "s3":
        return s3_filesystem(path.split("/")[0], key), path
    if protocol in ("gs", "gcs"):
        return _gs_filesystem(os.environ.get("STORAGE_EMULATOR_HOST")), path
    return _fsspec_filesystem(protocol, key), rest


@lru_cache
def _gs_filesystem(emulator: str | None) -> fs.GcsFileSystem:
    if emulator is None:
        return fs.GcsFileSystem(retry_time_limit=_GS_RETRY_TIME)
    host = emulator.removeprefix("http://").rstrip("/")
    return fs.GcsFileSystem(anonymous=True, scheme="http", endpoint_override=host, retry_time_limit=_GS_RETRY_TIME)


@lru_cache
def _fsspec_filesystem(protocol: str, key: str) -> fs.FileSystem:
    try:
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(protocol)))
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{key}: {protocol}:// cannot be read ({str(error).splitlines()[0]}); install what it needs, or use "
            "a path, s3://, gs:// or https://"
        ) from None


def access_error(location: str, error: OSError) -> OSError:
    """Return the PermissionError or ReadFailed for an error of a remote file system."""
    text = str(error)
    if "ACCESS_DENIED" in text or "HTTP status 403" in text or "PERMISSION_DENIED" in text:
        return PermissionError(13, "access denied", location)
    return ReadFailed(f"{location} cannot be read ({error_reason(error)}); check the network and start again")


class _LocalFile:
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self._descriptor, nbytes, offset)

    def close(self) -> None:
        os.close(self._descriptor)
