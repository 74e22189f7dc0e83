"""Runs whose nodes share only an S3 bucket: each node and each driver has a cache of its own."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from many_shards import prepare_many_shards
from ray.cluster_utils import Cluster
from s3_endpoint import S3
from workplace import begin, ended, json_lines, losses, make_workplace, multihop, wait_for

from multihop.cluster.runs.recipe import load_recipe
from multihop.common.cache import LIMIT
from multihop.common.mirror import push
from multihop.common.storage import open_folder
from multihop.data_prep.pipeline.identity import sources_key

# The short one is in tests/cluster/jobs.
pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(600)]
STEPS = 120
RECIPE = ["recipe.yaml", "cluster.workers=2", "model.dropout=0"]


@pytest.fixture
def cluster(s3: S3, tmp_path: Path) -> Iterator[Cluster]:
    """Two nodes of one CPU, whose processes have different caches."""
    result = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "env_vars": _cache(tmp_path / "node-0")},
    )
    # This is enough for some of the shards of the test that has many.
    result.add_node(num_cpus=1, env_vars=_cache(tmp_path / "node-1") | {LIMIT: "0.00037"})
    yield result
    result.shutdown()


def _cache(folder: Path) -> dict[str, str]:
    folder.mkdir()
    return {"XDG_CACHE_HOME": str(folder)}


def test_a_run_is_trained_resumed_elsewhere_and_the_same_as_on_one_disk(
    cluster: Cluster, s3: S3, texts: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, texts, "shared", STEPS)
    multihop(tmp_path, "train", *RECIPE, "name=local")
    local = tmp_path / "runs" / "local"

    runs = f"{bucket}/runs"
    options = ["--runs", runs, "--address", cluster.address]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node-0"))
    s3.failing_every = 10
    command = begin(tmp_path, "train", *RECIPE, *options)
    copy = next_copy(tmp_path / "node-0", tmp_path, command)
    wait_for(lambda: len(losses(copy)) > 30, tmp_path, command)
    command.terminate()
    ended(tmp_path, command, 75)

    # Another driver, whose disk is empty, goes on; the nodes' caches are lost too.
    for name in ("node-0", "node-1"):
        shutil.rmtree(tmp_path / name)
    output = multihop(tmp_path, "train", *RECIPE, *options)
    assert "fetched from" in output
    copy = next_copy(tmp_path / "node-0", tmp_path, None)
    assert losses(copy) == losses(local)
    assert [row["step"] for row in json_lines(copy / "launches.jsonl")][1] >= 30
    assert (copy / "data" / "manifest.json").read_bytes() == (local / "data" / "manifest.json").read_bytes()
    assert "nothing left to do" in multihop(tmp_path, "train", *RECIPE, *options)

    # An audit on a machine that has nothing of it.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "auditor"))
    printed = multihop(tmp_path, "checkpoints", "audit", f"{runs}/shared")
    assert "equal     all weights, moments and counters" in printed and "fetched from" in printed
    (row,) = open_folder(f"{runs}/shared").read_bytes("audits.jsonl").splitlines()
    assert json.loads(row)["last"] == STEPS
    listed = json.loads(multihop(tmp_path, "checkpoints", "list", f"{runs}/shared", "--json"))
    assert [row["audit"] for row in listed if row["step"] == STEPS] == ["audited"]
    assert f"step-{STEPS:08d}" in multihop(tmp_path, "checkpoints", "verify", f"{runs}/shared")
    refused = multihop(tmp_path, "checkpoints", "audit", f"{runs}/nothing", code=2)
    assert "is not a run, because it has no recipe.json" in refused
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node-0"))
    tasks = ["eval.tasks=[heldout-perplexity]", "eval.seeds=[0]", "eval.inits=[pretrained]"]
    multihop(tmp_path, "eval", *RECIPE, *tasks, *options)
    (row,) = json_lines(copy / "eval" / "results.jsonl")
    assert row["status"] == "ok" and (copy / "report.html").exists()
    run = open_folder(f"{runs}/shared")
    assert json.loads(run.read_bytes("summary.json"))["status"] == "done"
    assert [name for name in run.child("logs").names() if name.startswith("rank-1")]
    assert not (tmp_path / "runs" / "shared").exists() and os.listdir(tmp_path / "node-1")


def next_copy(cache: Path, workplace: Path, command: object) -> Path:
    """Return the driver's copy of the run on its node."""
    copies = cache / "multihop" / "remote-runs"
    if command is not None:
        wait_for(lambda: list(copies.glob("*/shared/recipe.json")), workplace, command)  # type: ignore[arg-type]
    (result,) = copies.glob("*/shared")
    return result


def test_the_driver_is_killed_and_the_store_is_away_for_a_minute(
    cluster: Cluster, s3: S3, texts: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workplace(tmp_path, texts, "shared", 600)
    multihop(tmp_path, "train", *RECIPE, "name=local")
    options = ["--runs", f"{bucket}/runs", "--address", cluster.address]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node-0"))
    command = begin(tmp_path, "train", *RECIPE, *options)
    copy = next_copy(tmp_path / "node-0", tmp_path, command)
    wait_for(lambda: len(losses(copy)) > 30, tmp_path, command)
    second = multihop(_beside(tmp_path), "train", *RECIPE, *options, code=2)
    assert "is in use by process" in second
    command.kill()
    command.wait()

    command = begin(tmp_path, "train", *RECIPE, *options)
    wait_for(lambda: len(json_lines(copy / "launches.jsonl")) == 2, tmp_path, command)
    seen = max(losses(copy))
    wait_for(lambda: max(losses(copy)) > seen + 10, tmp_path, command)
    s3.failing_every, s3.failure = 1, "503 Service Unavailable"
    time.sleep(60)
    s3.failing_every = 0
    ended(tmp_path, command)
    assert losses(copy) == losses(tmp_path / "runs" / "local")


def test_shards_come_while_the_ranks_train(
    cluster: Cluster, texts: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second node's disk has no room for all shards; the losses are those of a run on one disk."""
    make_workplace(tmp_path, texts, "shared", STEPS)
    recipe = load_recipe(tmp_path / "recipe.yaml", [])
    folder = tmp_path / "runs" / ".prepared" / sources_key(recipe.data) / "new"
    manifest = prepare_many_shards(recipe.data, recipe.tokenizer, folder)
    folder = folder.rename(folder.with_name(manifest.inputs[:16]))
    multihop(tmp_path, "train", *RECIPE, "name=local", "data.shuffle_window_shards=3")
    multihop(tmp_path, "train", *RECIPE, "name=all-shards")
    assert losses(tmp_path / "runs" / "local") != losses(tmp_path / "runs" / "all-shards")

    runs = f"{bucket}/runs"
    push(folder, open_folder(f"{runs}/.prepared/{sources_key(recipe.data)}/{folder.name}"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node-0"))
    options = ["--runs", runs, "--address", cluster.address]
    output = multihop(tmp_path, "train", *RECIPE, "data.shuffle_window_shards=3", *options)
    assert "fetched from" in output
    copy = next_copy(tmp_path / "node-0", tmp_path, None)
    assert losses(copy) == losses(tmp_path / "runs" / "local")
    fetched = list((tmp_path / "node-1").rglob("train-*.arrow"))
    assert 3 <= len(fetched) < len(manifest.of_split("train"))


def _beside(workplace: Path) -> Path:
    """Copy the recipe to another folder, so that its output is separate; returns the folder."""
    folder = workplace / "beside"
    folder.mkdir()
    shutil.copy(workplace / "recipe.yaml", folder)
    return folder
