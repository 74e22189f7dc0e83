"""One thing that is wrong with a cluster."""

from dataclasses import dataclass
from typing import Any

NodeReport = dict[str, Any]
"""What one node answered."""
ClusterReport = dict[str, Any]
"""What all nodes answered, and the links between them, as returned by `multihop.cluster.doctor.rounds.gather`."""


@dataclass(frozen=True)
class Finding:
    """What a person can act on."""

    node: str
    """Its name, those of both ends of a link, or "the cluster"."""
    check: str
    seen: str
    expected: str
    advice: str


def gigabytes(count: float) -> str:
    """For example 1.2 GB."""
    return f"{count / 1e9:,.1f} GB"


def rate(bytes_per_s: float) -> str:
    """For example 1,234 MB/s."""
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
