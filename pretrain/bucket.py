"""Writing into an S3 bucket, by boto3: what pyarrow cannot do without half a file being seen.

pyarrow completes an upload that it should abandon, and has no condition on what is there already. Paths are
BUCKET/KEY. Credentials and endpoint come from the same environment variables as for reading.
"""

import io
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from data_prep.reading.locations import s3_endpoint

_ATTEMPTS = 8
_CONFLICTS = 10
"""So often a conditional write is tried again that met another one of the same object."""
_PART = 64 * 1024**2
"""Bytes of a part. An object has at most 10,000 of them: a rank's file may have 625 GiB."""
_AT_ONCE = 4
"""Parts that are under way, and in memory."""


def put(path: str, region: str, data: bytes) -> None:
    """Write a small object, by one request: it is whole or as it was."""
    with _as_os_error(path) as key:
        _client(region).put_object(**key, Body=data)


def create(path: str, region: str, data: bytes) -> bool:
    """Write a small object unless there is one; whether it was written.

    A request that was answered and made again because the answer was lost says no about itself: compare what is there.

    Raises:
        ValueError: the store does not know conditional writes.
    """
    for _ in range(_CONFLICTS):
        try:
            with _as_os_error(path) as key:
                _client(region).put_object(**key, Body=data, IfNoneMatch="*")
            return True
        except OSError as error:
            match getattr(error.__cause__, "response", {}).get("Error", {}).get("Code"):
                case "PreconditionFailed":
                    return False
                case "NotImplemented":
                    raise ValueError(no_conditions(f"s3://{path}")) from None
                case "ConditionalRequestConflict":
                    time.sleep(0.2)
                case _:
                    raise
    raise TimeoutError(f"s3://{path} was written by others {_CONFLICTS} times in a row")


def no_conditions(location: str) -> str:
    """The sentence about a store on which two runs could own one place."""
    return (
        f"the store of {location} knows no conditional writes (If-None-Match: *), so that two runs could write to one "
        "place; choose a store that does, or a shared folder, for checkpoint.location"
    )


def upload(path: str, region: str, chunks: Iterable[bytes | memoryview]) -> None:
    """Write an object of any size. It is seen when it is whole; when `chunks` fails the upload is abandoned."""
    with _as_os_error(path) as key, io.BufferedReader(_Stream(chunks), io.DEFAULT_BUFFER_SIZE) as stream:
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(multipart_threshold=_PART, multipart_chunksize=_PART, max_concurrency=_AT_ONCE)
        config.max_in_memory_upload_chunks = _AT_ONCE
        _client(region).upload_fileobj(stream, **key, Config=config)


def copy(path: str, region: str, to: str) -> None:
    """Give an object a second name; its bytes stay in the store."""
    with _as_os_error(path) as source, _as_os_error(to) as key:
        _client(region).copy(source, **key)


def delete(path: str, region: str) -> None:
    """Remove the object of exactly this name, if it is there."""
    with _as_os_error(path) as key:
        _client(region).delete_object(**key)


class _Stream(io.RawIOBase):
    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
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


def _client(region: str) -> Any:
    names = ("AWS_PROFILE", "AWS_ACCESS_KEY_ID")
    return _client_of(region, s3_endpoint(), tuple(map(os.environ.get, names)))


@lru_cache
def _client_of(region: str, endpoint: str | None, environment: tuple[str | None, ...]) -> Any:
    """`environment` tells one set of credentials from another, and is read by boto3 itself."""
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "max_attempts": _ATTEMPTS},
        # As pyarrow does it: an endpoint of one's own need not have a name for each bucket, nor know new checksums.
        s3={"addressing_style": "path" if endpoint else "auto"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return Session().client("s3", region_name=region, endpoint_url=endpoint, config=config)


@contextmanager
def _as_os_error(path: str) -> Iterator[dict[str, str]]:
    """The bucket and key of a path; what boto3 raises becomes what a disk would."""
    try:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise ValueError("writing checkpoints to s3:// needs boto3; pip install 'multihop[s3]'") from None
    bucket, _, key = path.partition("/")
    try:
        yield {"Bucket": bucket, "Key": key}
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise OSError(f"s3://{path}: {re.sub('//[^/@ ]*@', '//', str(error))}") from error
