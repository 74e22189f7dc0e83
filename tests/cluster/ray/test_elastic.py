"""A run with as many ranks as the cluster has room for, while a node joins and is lost, and other jobs come and go."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ray.cluster_utils import Cluster
from workplace import begin, ended, json_lines, losses, make_workplace, multihop, wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 100_000
"""Enough steps that a restart with another rank is worth it on any machine; the run is stopped before."""


ALIKE = (
    "checkpoint.save_interval=100",
    "phases[0].lr=1e-4",
    "phases[0].schedule=constant",
    "phases[0].warmup_ratio=0",
    "model.dropout=0",
)
OTHER = """
import ray, sys, threading
ray.init(sys.argv[1], log_to_driver=False)
other = ray.remote(threading.Event).options(num_cpus=1).remote()
ray.get(other.is_set.remote())
print("has a CPU", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster whose head has one CPU."""
    result = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield result
    result.shutdown()


def test_a_run_grows_when_a_node_joins_and_shrinks_when_it_is_lost(
    cluster: Cluster, texts: Path, tmp_path: Path
) -> None:
    make_workplace(tmp_path, texts, "elastic", STEPS)
    run = tmp_path / "runs" / "elastic"
    recipe = ["train", "recipe.yaml", *ALIKE]
    command = begin(tmp_path, *recipe, "cluster.workers=[1, 2]", "--address", cluster.address)

    def starts() -> list[int]:
        return [row["world_size"] for row in json_lines(run / "launches.jsonl")]

    wait_for(lambda: len(losses(run)) > 50, tmp_path, command)
    node = cluster.add_node(num_cpus=1)
    wait_for(lambda: starts() == [1, 2], tmp_path, command)
    grown = max(losses(run))
    wait_for(lambda: max(losses(run)) > grown + 100, tmp_path, command)
    cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: starts() == [1, 2, 1] and max(losses(run)) > grown + 150, tmp_path, command)
    command.terminate()
    printed = ended(tmp_path, command, 75)

    assert "the cluster has room for 2 ranks instead of 1: they restart" in printed and "the ranks failed" in printed
    assert [row["step"] for row in json_lines(run / "launches.jsonl")][1] >= grown  # nothing was trained twice
    last = max(losses(run))
    multihop(tmp_path, *recipe, "name=undisturbed", "cluster.workers=1", f"phases[0].steps={last}")
    ours, theirs = losses(run), losses(tmp_path / "runs" / "undisturbed")
    assert sorted(ours) == sorted(theirs) == list(range(1, last + 1))
    np.testing.assert_allclose(
        [ours[step] for step in sorted(ours)], [theirs[step] for step in sorted(theirs)], rtol=1e-4
    )


@contextmanager
def other_job(cluster: Cluster) -> Iterator["subprocess.Popen[str]"]:
    """Start another job, which takes a CPU as soon as one is free, and prints that."""
    command = [sys.executable, "-c", OTHER, cluster.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            yield other
        finally:
            other.kill()


def test_training_uses_the_cpus_that_other_jobs_leave_and_waits_for_them(
    cluster: Cluster, texts: Path, tmp_path: Path
) -> None:
    """CPUs that another job takes are no reason to restart; those that become free when it ends are."""
    make_workplace(tmp_path, texts, "beside", STEPS)
    run, output = tmp_path / "runs" / "beside", tmp_path / "output.txt"

    def starts() -> list[int]:
        return [row["world_size"] for row in json_lines(run / "launches.jsonl")]

    with other_job(cluster) as first:
        assert first.stdout is not None and "has a CPU" in first.stdout.readline()
        command = begin(
            tmp_path, "train", "recipe.yaml", *ALIKE, "cluster.workers=[1, 3]", "--address", cluster.address
        )
        cluster.add_node(num_cpus=1)
        wait_for(lambda: len(losses(run)) > 50, tmp_path, command)  # on what is free
        assert starts() == [1]
        with other_job(cluster) as second:
            time.sleep(3)  # until it asks for a CPU
            cluster.add_node(num_cpus=1)
            assert second.stdout is not None and "has a CPU" in second.stdout.readline()
            time.sleep(20)  # in which a restart would come
            assert starts() == [1] and "they restart" not in output.read_text()
        wait_for(lambda: starts() == [1, 2], tmp_path, command)
        last = max(losses(run))
        wait_for(lambda: max(losses(run)) > last, tmp_path, command)
    command.terminate()
    ended(tmp_path, command, 75)


def test_a_run_without_free_resources_reports_that_it_waits(cluster: Cluster, texts: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "waits", 20)
    multihop(tmp_path, "prep", "recipe.yaml")
    with other_job(cluster) as other:
        assert other.stdout is not None and "has a CPU" in other.stdout.readline()
        command = begin(tmp_path, "train", "recipe.yaml", "cluster.workers=1", "--address", cluster.address)
        printed = "0 of the cluster's 1 CPUs are free, of the 1 CPUs that cluster.workers=1 needs"
        wait_for(lambda: printed in (tmp_path / "output.txt").read_text(), tmp_path, command)
    assert "the cluster has 1 free CPUs again" in ended(tmp_path, command)
