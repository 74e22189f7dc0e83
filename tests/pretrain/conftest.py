"""A place for checkpoints, on the disk and in a bucket, and a run that nobody disturbed."""

from pathlib import Path

import pytest
from s3_endpoint import bucket, s3, s3_server
from worker_runs import finish

__all__ = ["bucket", "s3", "s3_server"]


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest) -> str:
    """A location for files, once on the disk and once in a bucket."""
    if request.param == "disk":
        return str(request.getfixturevalue("tmp_path"))
    return f"{request.getfixturevalue('bucket')}/some/prefix"


@pytest.fixture(scope="session")
def in_one_go(bert_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, from its first step to its last by one start; tests leave it as it is."""
    return finish(tmp_path_factory.mktemp("in-one-go") / "run", bert_data, 2)
