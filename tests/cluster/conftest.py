"""A local Ray that several test files use."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from multihop.cluster.ray.session import start_ray


@pytest.fixture(scope="module")
def two_cpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray on two CPUs whose workers can import the packages and the files of tests."""
    import ray

    tests = Path(__file__).parent
    folders = [tests.parents[1] / "src", tests.parent / "support", tests / "ray", tests / "runs"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a command that a script starts in the background
    try:
        start_ray(num_cpus=2, runtime_env={"env_vars": environment})
    finally:
        signal.signal(signal.SIGINT, before)
    yield
    ray.shutdown()
