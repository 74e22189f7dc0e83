"""Preparation on several nodes gives the same bytes with any number of workers, also if workers or nodes die."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from provided import provided
from ray.cluster_utils import Cluster

from multihop.data_prep.config import DataConfig, DecontaminateConfig, NearDuplicatesConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.verify import VERIFIED, verify_dataset
from multihop.data_prep.pipeline.prepare import prepare

ROOT = Path(__file__).parents[3]
TOKENIZER = TokenizerConfig(vocab_size=100, threads=1)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A cluster whose head has one CPU."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def data(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    exam = tmp_path_factory.mktemp("exam") / "exam.txt"
    exam.write_text((texts / "0007.txt").read_text() + "\n")
    return DataConfig(
        sources=[Source(path=str(texts))],
        heldout_fraction=0.1,
        near_duplicates=NearDuplicatesConfig(shingle_words=2, threshold=0.7),
        decontaminate=DecontaminateConfig(against=[str(exam)]),
    )


@pytest.fixture(scope="module")
def expected(data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a preparation in one process."""
    out = tmp_path_factory.mktemp("here") / "data"
    prepare(data, TOKENIZER, out)
    return bytes_of(out)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihop.data_prep.reading.sources.group_into_splits.__defaults__", (5_000,))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != VERIFIED}


def test_any_number_of_workers_gives_the_same_bytes(nodes: Any, data, expected, tmp_path):
    assert ray.cluster_resources()["CPU"] == 1
    one, _ = provided(data, TOKENIZER, tmp_path / "1")
    assert bytes_of(one) == expected
    for workers, more in ((2, 1), (4, 2)):
        nodes.add_node(num_cpus=more)
        assert ray.cluster_resources()["CPU"] == workers
        folder, _ = provided(data, TOKENIZER, tmp_path / str(workers))
        assert bytes_of(folder) == expected


def test_workers_that_are_killed_change_nothing(nodes: Any, data, expected, tmp_path):
    killed: dict[str, set[str]] = {"read": set(), "sign": set(), "encode": set()}

    def kill(stage: str, done: int, total: int) -> None:
        if "busy" in killed.get(stage, {"busy"}):
            return
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                command = " ".join(process.cmdline())
                what = "idle" if "IDLE" in command else "busy"
                if process.name().startswith("ray::") and "Agent" not in command and (what == "busy" or done == 1):
                    process.send_signal(signal.SIGKILL)
                    killed[stage].add(what)

    folder, _ = provided(data, TOKENIZER, tmp_path / "store", report=kill)
    # Short tasks of the other stages may be done before they are found: then the workers die between two of them.
    assert "busy" in killed["read"] and all(killed.values()), killed
    assert bytes_of(folder) == expected and verify_dataset(folder) == []


@pytest.mark.long
def test_nodes_that_die_change_nothing(nodes: Any, data, expected, tmp_path):
    died = []
    while len(nodes.worker_nodes) < 2:  # tests run in two processes, and in any order
        nodes.add_node(num_cpus=1)

    def lose_a_node(stage: str, done: int, total: int) -> None:
        if done == 1 and stage in ("read", "sign", "encode"):
            died.append(stage)
            nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
            nodes.add_node(num_cpus=1)

    folder, _ = provided(data, TOKENIZER, tmp_path / "store", report=lose_a_node)
    assert died == ["read", "sign", "encode"]
    assert bytes_of(folder) == expected and verify_dataset(folder) == []
