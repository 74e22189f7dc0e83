"""Groups of tests that share a process when several processes run them (`pytest -n 2 --dist loadgroup`)."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that use the groups of training processes run in one, as starting these processes takes long; those with
    hosts of their own in another, as they watch what a machine's loss does to times. Both take longest, so that they
    begin first. Of the others, those of a file."""
    if config.getoption("dist", "no") != "loadgroup":
        return
    first = ("ranks", "hosts")
    items.sort(key=lambda item: first.index(_group(item)) if _group(item) in first else len(first))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    if "pool" in getattr(item, "fixturenames", []):
        return "ranks"
    return "hosts" if item.path.parent.name == "hosts" else item.path.stem
