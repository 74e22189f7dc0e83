"""A cluster without room for the ranks: the output says so, since when, and when that ends."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.experimental import internal_kv

from multihop.cluster.ray.capacity import Capacity


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster whose head has one CPU."""
    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=result.address, log_to_driver=False)
    yield result
    ray.shutdown()
    result.shutdown()


def test_a_start_that_waits_for_nodes_says_so_once_and_since_when(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with Capacity(2, 3) as nodes:
        check(nodes, cluster, capsys)
    assert asked_for() == []


def asked_for() -> list[dict[str, float]]:
    """Return the resources that an autoscaler, which this cluster lacks, would be asked for."""
    result: list[dict[str, float]] = json.loads(internal_kv._internal_kv_get("autoscaler_resource_request"))
    return result


def check(nodes: Capacity, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert [nodes.room_to_start() for _ in range(3)] == [0] * 3
    assert asked_for() == [{"CPU": 1}] * 3
    output = capsys.readouterr().err
    pattern = (
        r"(\S+) waiting for nodes since \1: the cluster has 1 of the 2 CPUs that cluster.workers=\[2, 3\] needs; .*\n"
    )
    assert re.fullmatch(pattern, output)
    added = cluster.add_node(num_cpus=1)
    assert nodes.room_to_start() == 2
    assert re.fullmatch(r"\S+ the cluster has 2 free CPUs again, after \d+ s\n", capsys.readouterr().err)
    assert nodes.room_to_start() == 2 and not capsys.readouterr().err
    more = [cluster.add_node(num_cpus=1) for _ in range(2)]
    assert nodes.room_to_start() == 3
    for node in (*more, added):
        cluster.remove_node(node)
    assert nodes.room_to_start() == 0 and "waiting for nodes since" in capsys.readouterr().err


def test_resources_of_other_jobs_do_not_count(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.add_node(num_cpus=2)
    others = [other_of(1.5)]  # which fits on the second node alone
    ranks = ray.util.placement_group([{"CPU": 1}])
    assert ranks.wait(60)
    with Capacity(1, 3) as elastic, Capacity(2, 2) as fixed:
        assert until(lambda: elastic.room() == 1)  # not the half that is left of a node
        assert asked_for() == [{"CPU": 1}] * 5
        assert until(lambda: elastic.room_to_start() == 1) and not capsys.readouterr().err
        assert until(lambda: fixed.room_to_start() == 0 and check_told(capsys.readouterr().err))
        ray.kill(others.pop())
        assert until(lambda: fixed.room_to_start() == 2)
        assert "the cluster has 3 free CPUs again" in capsys.readouterr().err


def test_ranks_on_cpus_leave_all_gpus_of_a_node_that_joins_free(cluster: Cluster) -> None:
    ranks = ray.util.placement_group([{"CPU": 1}])
    assert ranks.wait(60)
    with Capacity(1, 4) as nodes:
        assert nodes.room() == 1 and nodes.kind == "CPU"
        cluster.add_node(num_cpus=1, num_gpus=2)
        assert until(lambda: nodes.room() == 2) and nodes.kind == "GPU"


def check_told(output: str) -> bool:
    pattern = (
        r"(\S+) waiting for other jobs since \1: 1 of the cluster's 3 CPUs are free, of the 2 CPUs that "
        r"cluster.workers=2 needs; training resumes when enough are free\n"
    )
    assert not output or re.fullmatch(pattern, output)
    return bool(output)


def other_of(cpus: float) -> Any:
    """Return an actor that is not a rank and holds so many CPUs."""
    result: Any = ray.remote(threading.Event).options(num_cpus=cpus).remote()
    ray.get(result.is_set.remote(), timeout=60)
    return result


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def test_after_a_failed_placement_fewer_ranks_are_requested(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.add_node(num_cpus=2)
    with Capacity(1, 3) as nodes:
        assert nodes.room_to_start() == 3
        nodes.on_placement_failure(3)
        assert nodes.room_to_start() == 2 and "did not place 3 ranks" in capsys.readouterr().err
        nodes.on_placement_failure(2)
        nodes.on_placement_failure(1)
        assert nodes.room_to_start() == 1 and capsys.readouterr().err.endswith("trying again\n")
        others = [other_of(1), other_of(1)]
        assert until(lambda: nodes.room() == 1)  # two are taken, so that what is free is known again
        for other in others:
            ray.kill(other)
        assert until(lambda: nodes.room() == 3)
