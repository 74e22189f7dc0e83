"""The time of a collective as NCCL estimates it to choose an algorithm and a protocol: the latency of each hop of a
ring or a tree, and the bytes that are sent.

Latencies are those of `ncclTopoTuneModel` (https://github.com/NVIDIA/nccl, src/graph/tuning.cc, at b6475625), and
shares of the bandwidth about its own, without its limits by channel, SHARP and NVLink SHARP.
"""

import math
from dataclasses import dataclass

from multihop.common.gpus import Gpu

_GBIT = 1e9 / 8


@dataclass(frozen=True)
class Links:
    """What connects the ranks: NVLink or PCIe within a node, a network between nodes."""

    ranks: int
    nodes: int
    within_node: float
    """Bytes per second that a GPU sends to another one of its node."""
    has_nvlink: bool
    between_nodes: float
    """Bytes per second that a node sends to another one; 0 if there is one node."""

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a rank sends in a ring of all ranks, which passes each node once."""
        if self.nodes == 1:
            return self.within_node
        return min(self.within_node, self.between_nodes) if self.ranks > self.nodes else self.between_nodes


def links_of(gpu: Gpu, ranks: int, nodes: int = 1, network_gbit: float = 0.0) -> Links:
    """The links of ranks on such GPUs in so many nodes, whose network has these gigabits per second."""
    return Links(ranks, nodes, gpu.link, gpu.has_nvlink, network_gbit * _GBIT)


@dataclass(frozen=True)
class _Protocol:
    """Seconds of an algorithm with one of NCCL's protocols, and the share of the bandwidth that it reaches."""

    base_s: float
    nvlink_s: float
    pcie_s: float
    network_s: float
    bandwidth: float
    needs_nvlink: bool = False


_RING = (  # LL, LL128, Simple
    _Protocol(6.6e-6, 0.6e-6, 1.0e-6, 2.7e-6, 1 / 4),
    _Protocol(14.0e-6, 1.9e-6, 2.5e-6, 4.0e-6, 0.92, needs_nvlink=True),
    _Protocol(8.4e-6, 3.4e-6, 5.7e-6, 14.0e-6, 1.0),
)
_TREE = (
    _Protocol(6.8e-6, 0.6e-6, 1.0e-6, 5.0e-6, 0.92 / 3.8),
    _Protocol(14.0e-6, 1.25e-6, 1.9e-6, 8.5e-6, 0.92 * 0.92, needs_nvlink=True),
    _Protocol(0.0, 28e-6, 28e-6, 28e-6, 0.92),
)
_NETWORK_OVERHEAD_S = 1e-6
"""Least time of a hop in a ring through several nodes."""


def collective_s(sent: float, links: Links, share: float, *, is_all_reduce: bool) -> float:
    """Seconds of a collective of all ranks, by the algorithm and protocol that take the least time.

    Args:
        sent: Bytes that each rank sends in a ring.
        share: Of the bandwidth, what a collective reaches.
    """
    if links.ranks == 1:
        return 0.0
    bandwidth = links.bus_bandwidth * share
    times = [
        _ring_s(protocol, links, 2 if is_all_reduce else 1) + sent / (bandwidth * protocol.bandwidth)
        for protocol in _allowed(_RING, links)
    ]
    if is_all_reduce:
        whole = sent * links.ranks / (links.ranks - 1)  # a rank sends what it has up, and the sum down
        times += [
            _tree_s(protocol, links) + whole / (bandwidth * protocol.bandwidth) for protocol in _allowed(_TREE, links)
        ]
    return min(times)


def _allowed(protocols: tuple[_Protocol, ...], links: Links) -> list[_Protocol]:
    return [each for each in protocols if links.has_nvlink or not each.needs_nvlink]


def _hop_s(protocol: _Protocol, links: Links) -> float:
    return protocol.nvlink_s if links.has_nvlink else protocol.pcie_s


def _ring_s(protocol: _Protocol, links: Links, rounds: int) -> float:
    """Latency of an all-gather or a reduce-scatter, or of both, which are an all-reduce."""
    between = links.nodes - 1
    within = max(_hop_s(protocol, links), _NETWORK_OVERHEAD_S if between else 0.0)
    return protocol.base_s + rounds * ((links.ranks - 1 - between) * within + between * protocol.network_s)


def _tree_s(protocol: _Protocol, links: Links) -> float:
    within, between = links.ranks // links.nodes - 1, math.floor(math.log2(links.nodes))
    return protocol.base_s + 2 * (within * _hop_s(protocol, links) + between * protocol.network_s)
