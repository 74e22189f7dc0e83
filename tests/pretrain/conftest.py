"""A place for checkpoints, on the disk and in a bucket."""

import pytest
from s3_endpoint import bucket, s3, s3_server

__all__ = ["bucket", "s3", "s3_server"]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest) -> str:
    """A location for files, once on the disk and once in a bucket."""
    if request.param == "disk":
        return str(request.getfixturevalue("tmp_path"))
    return f"{request.getfixturevalue('bucket')}/some/prefix"
