"""S3 buckets: connections for reading by pyarrow, and atomic writes by boto3.

pyarrow would complete an upload that has to be abandoned, so that a partial object is visible, and has no conditional
writes. Credentials and endpoint come from the same environment variables for both.
"""

import errno
import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

from pyarrow import fs

from multihop.common.errors import UserError
from multihop.common.store import Bytes, Kind, RandomAccessFile

_RETRIES = 12
"""Repetitions of a request, with waits that begin at 25 ms and double: about 100 s in all."""
_FIRST_RETRIES = 6
_POLL_RETRIES = 3
_PREAMBLE = re.compile(r".*(AWS Error |with a last message of |google::cloud::Status\()", re.DOTALL)
_ATTEMPTS = 8
_POLL_ATTEMPTS = 2
_POLL_TIMEOUT_S = 10
_CONFLICTS = 10
"""Attempts of a conditional write that conflicts with another one of the same object."""
_ABSENT = ("NoSuchKey", "404")
"""The store's codes for an object that does not exist; the second is that of HEAD, whose response has no body."""
_PART_BYTES = 64 * 1024**2
"""Bytes per part. An object has at most 10,000 parts, so that a rank's file may have 625 GiB."""
_CONCURRENT_PARTS = 4
"""Number of parts that are uploaded at once, and in memory."""


class Bucket:
    """`Store` of the objects of a bucket, whose paths are BUCKET/KEY."""

    is_local = False

    def __init__(self, filesystem: fs.S3FileSystem, polled: bool) -> None:
        self._filesystem, self._region, self._polled = filesystem, str(filesystem.region), polled

    def entries(self, folder: str) -> dict[str, Kind]:
        """List the objects and prefixes in a folder, with one request per 1,000."""
        infos = self._filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        kinds: dict[bool, Kind] = {True: "folder", False: "file"}
        return dict(sorted((info.base_name, kinds[info.type == fs.FileType.Directory]) for info in infos))

    def files(self, folder: str) -> list[str]:
        """List the objects below a folder, with one request per 1,000."""
        infos = self._filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True, recursive=True))
        return sorted(info.path[len(folder) + 1 :] for info in infos if info.type == fs.FileType.File)

    def size(self, path: str) -> int | None:
        """Return the size of an object."""
        info = self._filesystem.get_file_info(path)
        return int(info.size) if info.type == fs.FileType.File else None

    def modified_at(self, path: str) -> float:
        """Return the modification time of an object."""
        return float(self._filesystem.get_file_info(path).mtime.timestamp())

    def open(self, path: str) -> RandomAccessFile:
        """Open an object."""
        return RandomAccessFile(self._filesystem.open_input_file(path))

    def write(self, path: str, chunks: Iterable[Bytes]) -> None:
        """Upload an object of any size. It becomes visible when it is whole; if `chunks` raises, the upload is
        aborted."""
        with _as_os_error(path) as key, io.BufferedReader(_Stream(chunks), io.DEFAULT_BUFFER_SIZE) as stream:
            from boto3.s3.transfer import TransferConfig

            config = TransferConfig(
                multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_CONCURRENT_PARTS
            )
            config.max_in_memory_upload_chunks = _CONCURRENT_PARTS
            _client(self._region).upload_fileobj(stream, **key, Config=config)

    def put(self, path: str, data: bytes) -> None:
        """Write a small object by one request."""
        with _as_os_error(path) as key:
            _client(self._region, self._polled).put_object(**key, Body=data)

    def create(self, path: str, data: bytes, writer: str) -> bool:
        """Write a small object unless it exists; returns whether it was written.

        If a response is lost, the retried request finds the object of the first one and returns False: compare the
        content.

        Raises:
            UserError: the store does not support conditional writes.
        """
        return self._put_if(path, data, {"IfNoneMatch": "*"}) is not None

    def read(self, path: str) -> tuple[bytes, str]:
        """Read an object; its ETag is its version.

        boto3 does not retry a response that breaks off, pyarrow does. If the object is replaced between the two
        requests, the version is too old, and a `replace` in that version fails.
        """
        with _as_os_error(path) as key:
            version = str(_client(self._region).head_object(**key)["ETag"])
        with self.open(path) as file:
            return b"".join(file.chunks()), version

    def replace(self, path: str, data: bytes, version: str | None) -> str | None:
        """Write a small object if it still has an ETag, or does not exist if that is None; returns the new one."""
        new = self._put_if(path, data, {"IfNoneMatch": "*"} if version is None else {"IfMatch": version})
        if new is None:
            # A request whose response was lost is sent again, and finds the object that it wrote.
            with suppress(FileNotFoundError):
                found, new = self.read(path)
                return new if found == data else None
        return new

    def _put_if(self, path: str, data: bytes, condition: dict[str, str]) -> str | None:
        """Write an object under a condition; returns its ETag, or None if the condition does not hold."""
        for _ in range(_CONFLICTS):
            try:
                with _as_os_error(path) as key:
                    return str(_client(self._region).put_object(**key, Body=data, **condition)["ETag"])
            except OSError as error:
                match _error_code(error):
                    case "PreconditionFailed":
                        return None
                    case code if code in _ABSENT:
                        return None
                    case "NotImplemented":
                        raise UserError(no_conditional_writes(f"s3://{path}")) from None
                    case "ConditionalRequestConflict":
                        time.sleep(0.2)
                    case _:
                        raise
        raise TimeoutError(f"s3://{path} conflicted with other writers {_CONFLICTS} times in a row")

    def remove(self, path: str) -> None:
        """Delete the object of exactly this name, if it exists."""
        with _as_os_error(path) as key:
            _client(self._region, self._polled).delete_object(**key)

    def sync(self, folder: str) -> None:
        """Do nothing: a request that was answered is durable."""

    def remove_folder(self, path: str) -> None:
        """Delete the empty object by which some tools mark a folder."""
        self.remove(f"{path}/")

    def move(self, folder: str, to: str) -> None:
        """Copy the objects of a folder in reverse order of their names within the store, and delete them in order."""
        names = [name for name, kind in self.entries(folder).items() if kind == "file"]
        for name in reversed(names):
            with _as_os_error(f"{folder}/{name}") as source, _as_os_error(f"{to}/{name}") as key:
                _client(self._region).copy(source, **key)
        for name in names:
            self.remove(f"{folder}/{name}")
        self.remove_folder(folder)


def connect(bucket: str, key: str, polled: bool = False) -> Bucket:
    """Connect to an S3 bucket as a store; `key` and `polled` as for `s3_filesystem`, which it raises as."""
    return Bucket(s3_filesystem(bucket, key, polled), polled)


def s3_filesystem(bucket: str, key: str, polled: bool = False) -> fs.S3FileSystem:
    """Connect to an S3 bucket, with retries.

    Args:
        polled: whether the caller repeats its requests itself: they fail within seconds, not after two minutes.

    Raises:
        UserError: the bucket does not exist or cannot be reached; the message names the recipe's `key`.
    """
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
    return _connect(bucket, s3_endpoint(), key, tuple(map(os.environ.get, names)), polled)


def s3_endpoint() -> str | None:
    """Return the endpoint of a store other than AWS, which pyarrow 25 does not read from the environment."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


@lru_cache
def _connect(
    name: str, endpoint: str | None, key: str, environment: tuple[str | None, ...], polled: bool
) -> fs.S3FileSystem:
    """`environment` only distinguishes sets of credentials in the cache; the AWS library reads them itself."""
    region = environment[0] or environment[1]
    what = f"bucket {name} at {endpoint.split('@')[-1] if endpoint else 'AWS'}"

    def connect(times: int) -> fs.S3FileSystem:
        # Not the standard strategy: it may retry 100 times in the life of a file system, because pyarrow 25 never tells
        # it that a request succeeded. A worker that asks each second for weeks would then end with one failure.
        retries = fs.AwsDefaultS3RetryStrategy(times)
        return fs.S3FileSystem(endpoint_override=endpoint, region=region, retry_strategy=retries)

    try:
        if region is None and endpoint is None:
            region = fs.resolve_s3_region(name)
        info = connect(_FIRST_RETRIES).get_file_info(name)
    except OSError as error:
        raise UserError(
            f"{what} cannot be used ({error_reason(error)}); check {key}, AWS_ENDPOINT_URL, "
            "AWS_REGION and the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        ) from None
    if info.type == fs.FileType.NotFound:
        raise UserError(f"{what} does not exist; create it or correct the name")
    return connect(_POLL_RETRIES if polled else _RETRIES)


def error_reason(error: OSError) -> str:
    """Return the reason of an error on one line, without the library's context."""
    return re.split(r"\n| error_info=", _PREAMBLE.sub("", error.strerror or str(error)))[0]


def no_conditional_writes(location: str) -> str:
    """Return the message about a store on which two runs could own one location."""
    return (
        f"the store of {location} does not support conditional writes (If-None-Match: * and If-Match), so two runs "
        "could write to one location; choose a store that does, or a shared directory, for checkpoint.location"
    )


def _error_code(error: BaseException) -> str | None:
    """The store's code of an error of boto3, or of an OSError that it caused."""
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", {})
    return response.get("Error", {}).get("Code")


class _Stream(io.RawIOBase):
    def __init__(self, chunks: Iterable[Bytes]) -> None:
        self._chunks, self._left = iter(chunks), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk).cast("B")
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _client(region: str, polled: bool = False) -> Any:
    names = ("AWS_PROFILE", "AWS_ACCESS_KEY_ID")
    return _client_of(region, s3_endpoint(), tuple(map(os.environ.get, names)), polled)


@lru_cache
def _client_of(region: str, endpoint: str | None, environment: tuple[str | None, ...], polled: bool) -> Any:
    """`environment` only distinguishes sets of credentials in the cache; boto3 reads them itself."""
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "max_attempts": _ATTEMPTS},
        # As pyarrow does: a custom endpoint may lack host names for buckets and support for new checksums.
        s3={"addressing_style": "path" if endpoint else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    if polled:
        retries = {"mode": "standard", "max_attempts": _POLL_ATTEMPTS}
        config = config.merge(Config(retries=retries, connect_timeout=_POLL_TIMEOUT_S, read_timeout=_POLL_TIMEOUT_S))
    return Session().client("s3", region_name=region, endpoint_url=endpoint, config=config)


@contextmanager
def _as_os_error(path: str) -> Iterator[dict[str, str]]:
    """Split a path into bucket and key, and turn boto3's exceptions into OSError."""
    try:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise UserError("writing to s3:// needs boto3; pip install 'multihop[s3]'") from None
    bucket, _, key = path.partition("/")
    try:
        yield {"Bucket": bucket, "Key": key}
    except (Boto3Error, BotoCoreError, ClientError) as error:
        if _error_code(error) in _ABSENT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"s3://{path}") from error
        raise OSError(f"s3://{path}: {re.sub('//[^/@ ]*@', '//', str(error))}") from error
