"""Hosts, where this machine and user can make them."""

import shutil
from collections.abc import Iterator

import pytest
from network_hosts import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    try:
        found = Hosts(2)
    except OSError as error:
        pytest.skip(f"this machine or user cannot make network namespaces: {error}")
    yield found
    found.remove()
