"""Connections to S3 buckets by pyarrow."""

import os
import re
from functools import lru_cache

from pyarrow import fs

from multihop.common.errors import UserError

_RETRIES = 12
"""How often a request is repeated, with waits that begin at 25 ms and double: about 100 s in all."""
_FIRST_RETRIES = 6
_PREAMBLE = re.compile(r".*(AWS Error |with a last message of |google::cloud::Status\()", re.DOTALL)


def s3_filesystem(bucket: str, key: str) -> fs.S3FileSystem:
    """The file system of an S3 bucket, with retries.

    Raises UserError, naming the recipe's `key`, when the bucket does not exist or cannot be reached.
    """
    names = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_ACCESS_KEY_ID")
    return _bucket(bucket, s3_endpoint(), key, tuple(map(os.environ.get, names)))


def s3_endpoint() -> str | None:
    """The endpoint of a store other than AWS; pyarrow 25 reads credentials from the environment, but not this."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


@lru_cache
def _bucket(name: str, endpoint: str | None, key: str, environment: tuple[str | None, ...]) -> fs.S3FileSystem:
    """`environment` only distinguishes sets of credentials in the cache; the AWS library reads them itself."""
    region = environment[0] or environment[1]
    where = f"bucket {name} at {endpoint.split('@')[-1] if endpoint else 'AWS'}"

    def connect(times: int) -> fs.S3FileSystem:
        # Not the standard strategy: it may retry 100 times in the life of a file system, because pyarrow 25 never tells
        # it that a request succeeded. A worker that asks each second for weeks would then end with one failure.
        retries = fs.AwsDefaultS3RetryStrategy(times)
        return fs.S3FileSystem(endpoint_override=endpoint, region=region, retry_strategy=retries)

    try:
        if region is None and endpoint is None:
            region = fs.resolve_s3_region(name)
        found = connect(_FIRST_RETRIES).get_file_info(name)
    except OSError as error:
        raise UserError(
            f"{where} cannot be used ({reason_of(error)}); check {key}, AWS_ENDPOINT_URL, "
            "AWS_REGION and the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        ) from None
    if found.type == fs.FileType.NotFound:
        raise UserError(f"{where} does not exist; create it or correct the name")
    return connect(_RETRIES)


def reason_of(error: OSError) -> str:
    """The reason of an error on one line, without the library's context."""
    return re.split(r"\n| error_info=", _PREAMBLE.sub("", error.strerror or str(error)))[0]
