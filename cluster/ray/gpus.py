"""The GPUs of a cluster, as their drivers name them. Ray's own names are too short: all A100 have the same."""

from dataclasses import dataclass

from multihop.cluster.ray.each_node import Call, Failed, call_on_nodes, nodes_of_cluster
from multihop.common.gpus import nvidia_smi

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ClusterGpus:
    """The GPUs of the live nodes that have some."""

    free_by_node: tuple[int, ...]
    """The number of GPUs of each node that no job has reserved, the most first."""
    names: tuple[str, ...]
    """The distinct names, such as "NVIDIA H100 80GB HBM3", in alphabetical order."""
    silent: tuple[str, ...]
    """For each node that did not answer: its name, and why."""


def gpus_of_cluster() -> ClusterGpus:
    """Ask each node that has GPUs for their names."""
    nodes = [node for node in nodes_of_cluster()[0] if node.gpus]
    answers = call_on_nodes([Call(node, _names) for node in nodes], _TIMEOUT_S)
    names = {name for answer in answers if not isinstance(answer, Failed) for name in answer}
    silent = [
        f"{node.name}: {answer.reason}"
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, Failed)
    ]
    free = sorted((node.free_gpus for node in nodes), reverse=True)
    return ClusterGpus(tuple(free), tuple(sorted(names)), tuple(silent))


def _names() -> list[str]:
    return [line.strip() for line in nvidia_smi("name").splitlines() if line.strip()]
