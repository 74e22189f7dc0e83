"""Groups of tests that share a process when several processes run them (`pytest -n 2 --dist loadgroup`)."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that use the groups of training processes run in one, and begin first: they take longest, and starting
    these processes does too. Of the others, those of a file."""
    if config.getoption("dist", "no") != "loadgroup":
        return
    items.sort(key=lambda item: "pool" not in _fixtures(item))
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ranks" if "pool" in _fixtures(item) else item.path.stem))


def _fixtures(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", []))
