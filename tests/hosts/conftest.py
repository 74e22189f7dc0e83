"""Hosts, where this machine and user can make them."""

import shutil
from collections.abc import Iterator

import pytest
from network_hosts import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two."""
    yield from _made(2)


@pytest.fixture
def three_hosts() -> Iterator[Hosts]:
    """Three."""
    yield from _made(3)


def _made(count: int) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    try:
        found = Hosts(count)
    except OSError as error:
        pytest.skip(f"this machine or user cannot make network namespaces: {error}")
    yield found
    found.remove()
