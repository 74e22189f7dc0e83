"""Times of collectives: NCCL's latencies by hand, and what follows from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihop.common.gpus import GPUS
from multihop.pretrain.plan.collectives import Links, collective_s, links_of

H100, PCIE = GPUS["H100"], GPUS["A100 PCIe 80GB"]
COUNTS = st.integers(1, 128).map(lambda nodes: links_of(H100, 8 * nodes, nodes, 3200.0))


def small(links: Links, *, is_all_reduce: bool) -> float:
    """Microseconds of a collective of a byte."""
    return 1e6 * collective_s(1.0, links, 1.0, is_all_reduce=is_all_reduce)


def test_the_latency_of_each_level() -> None:
    """A ring has a hop to each other rank; a tree those within a node, and the logarithm of the nodes."""
    node, pcie_node, nodes = links_of(H100, 8), links_of(PCIE, 8), links_of(H100, 1024, 128, 3200.0)
    assert small(node, is_all_reduce=False) == pytest.approx(6.6 + 7 * 0.6, abs=1e-3)
    assert small(pcie_node, is_all_reduce=False) == pytest.approx(6.6 + 7 * 1.0, abs=1e-3)
    assert small(node, is_all_reduce=True) == pytest.approx(6.6 + 2 * 7 * 0.6, abs=1e-3)
    assert small(nodes, is_all_reduce=False) == pytest.approx(6.6 + 896 * 1.0 + 127 * 2.7, abs=1e-3)
    assert small(nodes, is_all_reduce=True) == pytest.approx(6.8 + 2 * (7 * 0.6 + 7 * 5.0), abs=1e-3)
    assert small(links_of(H100, 1), is_all_reduce=True) == 0.0


def test_large_ones_take_their_bytes() -> None:
    for links, bandwidth in (
        (links_of(H100, 8), 450e9),
        (links_of(H100, 16, 2, 3200.0), 400e9),
        (links_of(H100, 16, 2, 100.0), 12.5e9),
        (links_of(PCIE, 2, 2, 3200.0), 400e9),  # a GPU a node: PCIe is not between them
    ):
        for is_all_reduce in (False, True):
            took = collective_s(1e12, links, 0.5, is_all_reduce=is_all_reduce)
            assert took == pytest.approx(1e12 / (0.5 * bandwidth), rel=1e-3)


@given(COUNTS, st.floats(1.0, 1e11), st.floats(1.0, 2.0), st.booleans())
def test_more_bytes_or_nodes_never_take_less(links: Links, sent: float, times: float, is_all_reduce: bool) -> None:
    took = collective_s(sent, links, 0.8, is_all_reduce=is_all_reduce)
    assert collective_s(sent * times, links, 0.8, is_all_reduce=is_all_reduce) >= took
    more = links_of(H100, 2 * links.ranks, 2 * links.nodes, 3200.0)
    assert collective_s(sent, more, 0.8, is_all_reduce=is_all_reduce) >= took * (1 - 1e-9)


@given(st.floats(1.0, 1e11), st.booleans())
def test_the_fastest_protocol_is_chosen(sent: float, is_all_reduce: bool) -> None:
    """No collective takes longer than its bytes at the full bandwidth after the latency of a ring for large ones."""
    links = links_of(H100, 64, 8, 3200.0)
    hops = 8.4e-6 + (2 if is_all_reduce else 1) * (56 * 3.4e-6 + 7 * 14e-6)
    assert collective_s(sent, links, 1.0, is_all_reduce=is_all_reduce) <= (hops + sent / 400e9) * (1 + 1e-9)
