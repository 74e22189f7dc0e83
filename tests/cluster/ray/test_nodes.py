"""A cluster that is too small for the ranks: the user is told so, since when, and when that ends."""

import json
import re
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv

from cluster.ray.nodes import Nodes


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with one CPU."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


def test_a_start_that_waits_for_nodes_says_so_once_and_since_when(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with Nodes(2, 3) as nodes:
        check(nodes, cluster, capsys)
    assert asked_for() == []


def asked_for() -> list[dict[str, float]]:
    """What an autoscaler, which this cluster lacks, would be told to have room for."""
    found: list[dict[str, float]] = json.loads(internal_kv._internal_kv_get("autoscaler_resource_request"))
    return found


def check(nodes: Nodes, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert [nodes.room() for _ in range(3)] == [0] * 3
    assert asked_for() == [{"CPU": 1}] * 3
    said = capsys.readouterr().err
    pattern = (
        r"(\S+) waiting for nodes since \1: the cluster has 1 of the 2 CPUs that cluster.workers=\[2, 3\] needs; .*\n"
    )
    assert re.fullmatch(pattern, said)
    added = cluster.add_node(num_cpus=1)
    assert nodes.room() == 2
    assert re.fullmatch(r"\S+ the cluster has 2 CPUs again, after \d+ s\n", capsys.readouterr().err)
    assert nodes.room() == 2 and not capsys.readouterr().err
    more = [cluster.add_node(num_cpus=1) for _ in range(2)]
    assert nodes.room() == 3
    for node in (*more, added):
        cluster.remove_node(node)
    assert nodes.room() == 0 and "waiting for nodes since" in capsys.readouterr().err
