"""A run that takes what ranks the cluster has room for: a node joins, and is lost."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ray.cluster_utils import Cluster
from workplace import begin, ended, json_lines, losses, make_workplace, multihop, wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 100_000
"""So many that a restart with another rank pays on any machine: the run is stopped before."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head with one CPU."""
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield found
    found.shutdown()


def test_a_run_grows_when_a_node_joins_and_shrinks_when_it_is_lost(
    cluster: Cluster, texts: Path, tmp_path: Path
) -> None:
    make_workplace(tmp_path, texts, "elastic", STEPS)
    run = tmp_path / "runs" / "elastic"
    recipe = [
        "train",
        "recipe.yaml",
        "checkpoint.every_steps=100",
        "phases[0].lr=1e-4",
        "phases[0].schedule=constant",
        "phases[0].warmup=0",
        "model.dropout=0",
    ]
    command = begin(tmp_path, *recipe, "cluster.workers=[1, 2]", "--address", cluster.address)

    def starts() -> list[int]:
        return [row["world_size"] for row in json_lines(run / "starts.jsonl")]

    wait_for(lambda: len(losses(run)) > 50, tmp_path, command)
    node = cluster.add_node(num_cpus=1)
    wait_for(lambda: starts() == [1, 2], tmp_path, command)
    grown = max(losses(run))
    wait_for(lambda: max(losses(run)) > grown + 100, tmp_path, command)
    cluster.remove_node(node, allow_graceful=False)
    wait_for(lambda: starts() == [1, 2, 1] and max(losses(run)) > grown + 150, tmp_path, command)
    command.terminate()
    said = ended(tmp_path, command, 75)

    assert "the cluster has room for 2 ranks instead of 1: they restart" in said and "the ranks failed" in said
    assert [row["step"] for row in json_lines(run / "starts.jsonl")][1] >= grown  # nothing was trained twice
    last = max(losses(run))
    multihop(tmp_path, *recipe, "name=undisturbed", "cluster.workers=1", f"phases[0].steps={last}")
    ours, theirs = losses(run), losses(tmp_path / "runs" / "undisturbed")
    assert sorted(ours) == sorted(theirs) == list(range(1, last + 1))
    np.testing.assert_allclose(
        [ours[step] for step in sorted(ours)], [theirs[step] for step in sorted(theirs)], rtol=1e-4
    )
