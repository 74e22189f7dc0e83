"""Runs on several hosts of this machine, with the driver on the first."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from network_hosts import Hosts
from worker_runs import run_of_rank
from workplace import json_lines, losses, make_workplace

RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32}
SAME_BUT_FOR_ROUNDING = (
    "model.dropout=0",
    "phases[0].lr=1e-4",
    "phases[0].schedule=constant",
    "phases[0].warmup_ratio=0",
)
"""Overrides with which losses on other numbers of ranks differ by rounding alone, whatever the last step is."""


def wait_for(condition: Callable[[], Any], output: Path) -> None:
    """Wait until the condition holds; fails with the output after a time limit."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def begin_on_all(hosts: Hosts, texts: Path, folder: Path, steps: int, *overrides: str) -> "subprocess.Popen[bytes]":
    """Start Ray on all hosts and a run named two, whose driver prints to output.txt."""
    make_workplace(folder, texts, "two", steps)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"]["sources"] = [{"path": str(texts.absolute())}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for host in range(len(hosts.names)):
        hosts.start_ray(host, folder / f"ray-start-{host}.txt", cpus=1, **RAY)
    return train(hosts, folder, *overrides)


def train(hosts: Hosts, folder: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    """Start `multihop train` on the first host."""
    place = ["--runs", str(folder / "runs"), "--address", f"{hosts.addresses[0]}:6379"]
    command = [
        sys.executable,
        "-m",
        "multihop.cluster.cli.main",
        "train",
        str(folder / "recipe.yaml"),
        *overrides,
        *place,
    ]
    return hosts.start(0, command, folder / "output.txt", **RAY)


def sizes(run: Path) -> list[int]:
    """Return the number of ranks of each launch of a run."""
    return [row["world_size"] for row in json_lines(run / "launches.jsonl")]


def rank_on(hosts: Hosts, host: int, run: Path) -> psutil.Process:
    """Return the rank of a host, which is not one of its data workers."""
    ranks = [process for process in hosts.processes(host) if run_of_rank(process) == str(run)]
    pids = {process.pid for process in ranks}
    return next(process for process in ranks if process.ppid() not in pids)


def assert_as_undisturbed(hosts: Hosts, folder: Path, run: Path) -> None:
    """Assert that a stopped run has the losses of an uninterrupted run on one rank, up to rounding."""
    last, output = max(losses(run)), folder / "output.txt"
    alike = ("name=undisturbed", "cluster.workers=1", f"phases[0].steps={last}")
    assert train(hosts, folder, *SAME_BUT_FOR_ROUNDING, *alike).wait(timeout=300) == 0, output.read_text()
    ours, theirs = losses(run), losses(folder / "runs" / "undisturbed")
    assert sorted(ours) == sorted(theirs) == list(range(1, last + 1))
    assert max(abs(ours[step] - theirs[step]) for step in ours) < 1e-3
