"""The plan of a training on GPUs before it starts. The GPUs of these tests exist in Ray and nvidia-smi alone: the ranks
train on CPUs."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from multihop.cluster.cli.main import app
from multihop.cluster.ray.gpus import ClusterGpus
from multihop.cluster.runs.plan_training import assumed_links, kinds_of, summary_of, weakest_gpu
from multihop.common.errors import UserError
from multihop.common.gpus import GPUS
from multihop.common.json_lines import read_rows
from multihop.pretrain.plan.outside_steps import host_rate


def row(*phases: dict[str, Any], nodes: int = 1) -> dict[str, Any]:
    return {"ranks": 8, "gpus": ["NVIDIA H100"], "nodes": nodes, "usable_bytes": 72e9, "phases": list(phases)}


def phase(number: int, left_s: float | None, gigabytes: float, limited_by: str = "attention") -> dict[str, Any]:
    numbers = {"phase": number, "peak_bytes": gigabytes * 1e9, "traced_samples": 1}
    return numbers | {"left_s": left_s, "limited_by": limited_by}


def test_the_line_has_what_is_left_and_the_most_memory() -> None:
    both = phase(0, 7200.0, 30.0), phase(1, 100.0, 60.5, "launches")
    assert summary_of(row(*both)) == "8 x NVIDIA H100: 2 h 1 min left, 60.5 of 72.0 GB a GPU, limited by attention"
    over_nodes = summary_of(row(*both, nodes=2))
    assert over_nodes.endswith("GB a GPU, if the links between nodes are as fast as those within one")


def test_a_phase_that_does_not_fit_is_named_unless_it_is_done() -> None:
    assert summary_of(row(phase(0, 10.0, 30.0), phase(1, None, 99.0))) == (
        "8 x NVIDIA H100: phases[1] does not fit, with 99.0 of 72.0 GB a GPU for micro-batches of 1"
    )
    assert "1 min 40 s left, 60.0 of" in summary_of(row(phase(0, 0.0, 99.0), phase(1, 100.0, 60.0)))


def test_of_several_kinds_each_rate_and_the_memory_are_the_least() -> None:
    mixed = weakest_gpu(kinds_of(ClusterGpus((8, 8), ("NVIDIA A100-SXM4-80GB", "NVIDIA L40S"), ())))
    assert (mixed.memory, mixed.achievable_flops, mixed.bandwidth) == (48e9, 271e12, 864e9)
    kinds = kinds_of(ClusterGpus((8, 8), ("NVIDIA L4", "Tesla V100-SXM2-32GB"), ()))
    # The precision is checked of each: the L4 is slower, but the V100 has no bf16.
    assert [kind.name for kind in kinds] == ["L4", "V100 32GB"] and weakest_gpu(kinds).name == "L4"
    with pytest.raises(UserError, match="NVIDIA Unheard-of are not known; describe them"):
        kinds_of(ClusterGpus((8, 8), ("NVIDIA L40S", "NVIDIA Unheard-of"), ()))
    with pytest.raises(UserError, match="no names of GPUs on b: no answer"):
        kinds_of(ClusterGpus((8, 8), ("NVIDIA L40S",), ("b: no answer",)))


def test_ranks_share_the_memory_of_their_own_host_alone() -> None:
    gpu = GPUS["H100"]
    one, eight = assumed_links(gpu, 8, 1), assumed_links(gpu, 64, 8)
    assert one.bus_bandwidth == eight.bus_bandwidth == gpu.link
    assert host_rate(gpu, one, 1.0) == host_rate(gpu, eight, 1.0) < host_rate(gpu, assumed_links(gpu, 1, 1), 1.0)


@pytest.fixture
def gpu_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with what nvidia-smi says."""
    name, program = tmp_path / "gpu-name", tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {name}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return name


@pytest.fixture
def two_gpus(gpu_name: Path) -> Iterator[str]:
    """The address of a Ray of two GPUs."""
    gpus = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
    yield gpus.address
    ray.shutdown()
    gpus.shutdown()


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_training_is_planned_at_each_start_and_compared_at_its_end(
    two_gpus: str, gpu_name: Path, texts: Path, tmp_path: Path
) -> None:
    content = {
        "name": "planned",
        "data": {"sources": [{"path": str(texts)}], "heldout_fraction": 0.1},
        "tokenizer": {"vocab_size": 100},
        "model": {"preset": "bert-tiny"},
        "phases": [{"seq_len": 64, "global_batch_size": 8, "steps": 6}, {"seq_len": 128, "global_batch_size": 8}],
        "engine": {"micro_batch_size": "auto", "log_interval": 2},
        "cluster": {"address": two_gpus},
        "eval": {"tasks": []},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(content))
    run = tmp_path / "runs" / "planned"

    def errors_of(command: str, gpu: str, *arguments: str) -> str:
        gpu_name.write_text(f"{gpu}\n")
        result = CliRunner().invoke(app, [command, str(recipe), "--runs", str(run.parent), *arguments])
        assert result.exit_code == 0, result.output
        return result.stderr

    lines = errors_of("train", "NVIDIA H100 80GB HBM3", "phases[1].steps=4").splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("plan      2 x NVIDIA H100 80GB HBM3: "))
    assert "0.0 of 72.0 GB a GPU, limited by " in lines[at]
    assert at < next(number for number, line in enumerate(lines) if line.startswith("pretrain "))
    longer = ("phases[1].steps=8", "--allow-change", "phases")
    assert "GPUs NVIDIA Unheard-of are not known; describe them" in errors_of("train", "NVIDIA Unheard-of", *longer)
    longest = ("phases[1].steps=12", "--allow-change", "phases")
    assert "2 x NVIDIA A100-SXM4-40GB: " in errors_of("run", "NVIDIA A100-SXM4-40GB", *longest)

    first, second, third = read_rows(run / "plans.jsonl")
    assert [each["from_step"] for each in (first, second, third)] == [0, 10, 14]
    assert [phase["steps"] for phase in third["phases"]] == [6, 12] and "reason" in second
    done, left = (phase["left_s"] for phase in third["phases"])
    phase = third["phases"][1]
    assert done == 0.0
    assert left == pytest.approx(4 * phase["step_s"] + 4 / 12 * (phase["save_s"] + phase["eval_s"]))
    report = [line.split(" | ") for line in (run / "report.md").read_text().splitlines() if " x NVIDIA " in line]
    assert [(cells[0], cells[2]) for cells in report] == [("| 1", "0"), ("| 7", "1"), ("| 15", "1")]
    assert report[0][3] == f"{first['phases'][0]['tokens_per_s']:,.0f}"
    assert all(float(cells[4].replace(",", "")) > 0 for cells in report)  # measured
