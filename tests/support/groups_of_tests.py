"""Groups of tests that share a process when several processes run them (`pytest -n 2 --dist loadgroup`)."""

import gc
import os
from collections.abc import Generator

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # OpenMP's threads busy-wait: two processes of two threads on two cores took eight times as long as two of one.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group the tests that use the pools of training processes, since starting these takes long; those with hosts of
    their own, because they measure times after a host is lost; and the others by file. The first two groups take
    longest and begin first."""
    if not config.getoption("loadgroup", False):  # which xdist sets in the processes that run tests
        return
    first = ("ranks", "hosts")
    items.sort(key=lambda item: first.index(_group(item)) if _group(item) in first else len(first))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("loadgroup", False):
        ungrouped = [item.nodeid for item in session.items if not item.nodeid.endswith(f"@{_group(item)}")]
        assert not ungrouped, f"pytest-xdist does not group {ungrouped[0]}: does it know this version of pytest?"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """After each file, freeze the surviving objects, mostly libraries: a full collection over them takes half a
    second."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def _group(item: pytest.Item) -> str:
    if "pool" in getattr(item, "fixturenames", []):
        return "ranks"
    return "hosts" if item.path.parent.name == "hosts" else item.path.stem
