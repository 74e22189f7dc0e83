"""A run that nobody disturbed."""

from pathlib import Path

import pytest
from worker_runs import finish


@pytest.fixture(scope="session")
def in_one_go(bert_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, from its first step to its last by one start; tests leave it as it is."""
    return finish(tmp_path_factory.mktemp("in-one-go") / "run", bert_data, 2)
