"""An uninterrupted run, as a reference."""

from pathlib import Path

import pytest
from worker_runs import finish


@pytest.fixture(scope="session")
def in_one_go(bert_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, from its first step to its last in one launch; tests do not change it."""
    return finish(tmp_path_factory.mktemp("in-one-go") / "run", bert_data, 2)
