"""What is forecast before a training starts on GPUs. Those of the tests have a name and a place in Ray, and no more:
the ranks train on CPUs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import yaml
from ray.cluster_utils import Cluster
from typer.testing import CliRunner

from multihop.cluster.cli.main import app

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(600)]


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


def test_a_forecast_before_the_training_and_beside_what_was_measured(
    two_gpus: str, gpu_name: Path, texts: Path, tmp_path: Path
) -> None:
    content = {
        "name": "forecast",
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
    run = tmp_path / "runs" / "forecast"

    def printed(command: str, *arguments: str) -> str:
        gpu_name.write_text(arguments[0])
        result = CliRunner().invoke(
            app, [command, str(recipe), "phases[1].steps=4", "--runs", str(run.parent), *arguments[1:]]
        )
        assert result.exit_code == 0, result.output
        return result.stderr

    lines = printed("run", "NVIDIA H100 80GB HBM3\n").splitlines()
    (told,) = (number for number, line in enumerate(lines) if line.startswith("forecast  2 x H100: "))
    assert "0.0 of 72.0 GB a GPU, limited by " in lines[told]
    assert told < next(number for number, line in enumerate(lines) if line.startswith("pretrain "))
    forecast = json.loads((run / "forecast.json").read_text())
    assert [phase["steps"] for phase in forecast["phases"]] == [6, 4] and forecast["from_step"] == 0
    report = (run / "report.md").read_text()
    (first,) = (line for line in report.splitlines() if line.startswith("| 0 | "))
    assert first.split(" | ")[1] == f"{forecast['phases'][0]['tokens_per_s']:,.0f}"

    # What is left of a run that goes on, and a GPU that is not known.
    again = ("phases[1].steps=8", "--allow-change", "phases")
    assert "GPUs (NVIDIA Unheard-of) are not known; describe them" in printed("train", "NVIDIA Unheard-of\n", *again)
    assert json.loads((run / "forecast.json").read_text()) == forecast
