"""What stands at a location: a path of this machine, s3://, gs://, http(s):// or any other protocol of fsspec.

Credentials come from where each provider's own tools take them. For S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or
a profile or the instance's role, AWS_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; for gs: Google's application
default credentials, or STORAGE_EMULATOR_HOST.
"""

import os
import re
from datetime import timedelta
from functools import lru_cache
from typing import Protocol

from pyarrow import fs

from data_prep.reading.failures import ReadFailed
from data_prep.reading.http import HttpFile, describe, is_http

_ATTEMPTS = 8
"""How often a request is made before its failure counts; the waits between grow to 20 s."""
_FIRST_ATTEMPTS = 3
_GS_PATIENCE = timedelta(seconds=60)


_PREAMBLE = re.compile(r".*(AWS Error |with a last message of |google::cloud::Status\()", re.DOTALL)


class Positional(Protocol):
    """A file open for reading by position."""

    def read_at(self, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` bytes from `offset` on; fewer at the end of the file."""

    def close(self) -> None:
        """It is not read any more."""


def is_remote(location: str) -> bool:
    """Whether it is a URL and no path of this machine."""
    return "://" in location


def block_bytes(location: str) -> int:
    """How much to read at once: remotely a block is a request, with its latency."""
    return 8 * 2**20 if is_remote(location) else 2**20


def open_location(location: str) -> Positional:
    """Raises FileNotFoundError, PermissionError and other OSErrors of this machine; ReadFailed where it is remote."""
    if not is_remote(location):
        return _LocalFile(location)
    if is_http(location):
        return HttpFile(location)
    filesystem, path = filesystem_of(location)
    try:
        return filesystem.open_input_file(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise refused(location, error) from None


def version_of(location: str) -> tuple[int, int, str]:
    """Size, time of change in ns (0: not told), and what changes with a remote file ("": nothing is known to).

    Raises as `open_location` does.
    """
    if is_http(location):
        about = describe(location)
        return about.size, about.mtime_ns, about.version
    if not is_remote(location):
        status = os.stat(location)
        return status.st_size, status.st_mtime_ns, ""
    filesystem, path = filesystem_of(location)
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
        raise refused(location, error) from None
    if info.type != fs.FileType.File:
        raise FileNotFoundError(2, "No such file or directory", location)
    return info.size, info.mtime_ns or 0, f"changed {info.mtime_ns}" if info.mtime_ns else ""


def filesystem_of(location: str, key: str = "the location") -> tuple[fs.FileSystem, str]:
    """The file system of a URL that is not HTTP's, and what it calls the path.

    Raises ValueError, naming the recipe's `key`, when the protocol is not known or the bucket cannot be reached.
    """
    protocol, _, rest = location.partition("://")
    path = "/".join(part for part in rest.split("/") if part)
    if protocol == "s3":
        return s3_filesystem(path.split("/")[0], key), path
    if protocol in ("gs", "gcs"):
        return _gs_filesystem(os.environ.get("STORAGE_EMULATOR_HOST")), path
    return _fsspec_filesystem(protocol, key), rest


def s3_filesystem(bucket: str, key: str) -> fs.S3FileSystem:
    """An S3 bucket's file system, which makes a request that fails again.

    Raises ValueError, naming the recipe's `key`, when the bucket is not there or cannot be reached.
    """
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
    return _bucket(bucket, s3_endpoint(), key, tuple(map(os.environ.get, names)))


def s3_endpoint() -> str | None:
    """Of a store that is not AWS's. pyarrow takes the credentials from the environment, and it not (version 25)."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


@lru_cache
def _bucket(name: str, endpoint: str | None, key: str, environment: tuple[str | None, ...]) -> fs.S3FileSystem:
    """`environment` tells one set of credentials from another, and is read by the AWS library itself."""
    region = environment[0] or environment[1]
    where = f"bucket {name} at {endpoint.split('@')[-1] if endpoint else 'AWS'}"

    def connect(attempts: int) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            endpoint_override=endpoint, region=region, retry_strategy=fs.AwsStandardS3RetryStrategy(attempts)
        )

    try:
        if region is None and endpoint is None:
            region = fs.resolve_s3_region(name)
        found = connect(_FIRST_ATTEMPTS).get_file_info(name)
    except OSError as error:
        raise ValueError(
            f"{where} cannot be used ({reason_of(error)}); check {key}, AWS_ENDPOINT_URL, "
            "AWS_REGION and the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        ) from None
    if found.type == fs.FileType.NotFound:
        raise ValueError(f"{where} does not exist; make it, or correct the name")
    return connect(_ATTEMPTS)


@lru_cache
def _gs_filesystem(emulator: str | None) -> fs.GcsFileSystem:
    if emulator is None:
        return fs.GcsFileSystem(retry_time_limit=_GS_PATIENCE)
    host = emulator.removeprefix("http://").rstrip("/")
    return fs.GcsFileSystem(anonymous=True, scheme="http", endpoint_override=host, retry_time_limit=_GS_PATIENCE)


@lru_cache
def _fsspec_filesystem(protocol: str, key: str) -> fs.FileSystem:
    try:
        import fsspec

        return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(protocol)))
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"{key}: {protocol}:// cannot be read here ({str(error).splitlines()[0]}); install what it needs, or use "
            "a path, s3://, gs:// or https://"
        ) from None


def reason_of(error: OSError) -> str:
    """What went wrong, on one line, without the library's account of how it came to it."""
    return re.split(r"\n| error_info=", _PREAMBLE.sub("", error.strerror or str(error)))[0]


def refused(location: str, error: OSError) -> OSError:
    """The error of a remote place that `error` stands for: PermissionError or ReadFailed."""
    text = str(error)
    if "ACCESS_DENIED" in text or "HTTP status 403" in text or "PERMISSION_DENIED" in text:
        return PermissionError(13, "access denied", location)
    return ReadFailed(f"{location} cannot be read ({reason_of(error)}); check the network and start again")


class _LocalFile:
    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, nbytes: int, offset: int) -> bytes:
        return os.pread(self._descriptor, nbytes, offset)

    def close(self) -> None:
        os.close(self._descriptor)
