"""`multihop stop` in each stage of a job over two hosts: 30 seconds later nothing of it is left on any of them."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from host_runs import RAY
from network_hosts import Hosts
from workplace import json_lines, losses, make_workplace

from multihop.cluster.ray.jobs import JOB

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(900)]
LEFT_S = 30
WORDS = ["river", "stone", "letter", "garden", "winter", "music", "silver", "forest", "harbour", "morning"]


@pytest.fixture
def workplace(hosts: Hosts, tmp_path: Path) -> Path:
    """A recipe whose stages take a minute each."""
    (tmp_path / "temporary").mkdir()
    lines = [" ".join(WORDS[(number * k + k) % len(WORDS)] for k in range(3, 20)) for number in range(40_000)]
    (tmp_path / "texts.txt").write_text("\n".join(f"{line} {number}." for number, line in enumerate(lines)))
    (tmp_path / "own.csv").write_text(
        "what,how\n" + "".join(f"{WORDS[i % len(WORDS)]} {i},{i % 2}\n" for i in range(200))
    )
    task = {"kind": "classification", "train": "own.csv", "fields": {"text": "what", "label": "how"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task))
    make_workplace(tmp_path, tmp_path / "texts.txt", "small", 400)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["data"] = {"sources": [{"path": str(tmp_path / "texts.txt"), "documents": "line"}], "heldout_fraction": 0.01}
    tasks = [str(tmp_path / "own.yaml")]
    recipe["eval"] = {"tasks": tasks, "epochs": 400, "seeds": [0, 1, 2], "seq_len": 32, "max_examples": 200}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "TMPDIR": str(tmp_path / "temporary"), **RAY}
    for host in (0, 1):
        hosts.start_ray(host, tmp_path / f"ray-{host}.txt", 1, dashboard=True, **environment)
    return tmp_path


def of_the_job(hosts: Hosts) -> list[str]:
    """Processes that were started for a job."""
    found = []
    for host in (0, 1):
        for process in hosts.processes(host):
            try:
                if JOB in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{host}: {' '.join(process.cmdline())}")
            except psutil.NoSuchProcess:
                continue
    return found


def test_nothing_is_left(hosts: Hosts, workplace: Path) -> None:
    run, output = workplace / "runs" / "small", workplace / "output.txt"
    memory, temporary = set(Path("/dev/shm").iterdir()), workplace / "temporary"
    multihop, there = [sys.executable, "-m", "multihop.cluster.cli.main"], ["--address", "http://127.0.0.1:8265"]
    assert hosts.start(0, [*multihop, "jobs", *there], workplace / "jobs.txt", **RAY).wait(timeout=60) == 0
    rays = {path.name for path in temporary.iterdir()}  # the dashboard has a folder there
    submit = ["submit", str(workplace / "recipe.yaml"), "--runs", str(workplace / "runs"), *there]
    stages = {
        "preparation": lambda: "prepare" in output.read_text(),
        "pretraining": lambda: len(losses(run)) > 15,
        "evaluation": lambda: "evaluate  " in output.read_text(),
    }
    for stage, runs in stages.items():
        output.write_text("")
        following = hosts.start(0, [*multihop, *submit], output, **RAY)
        deadline = time.monotonic() + 300
        while not runs():
            assert time.monotonic() < deadline and following.poll() is None, output.read_text()
            time.sleep(0.2)
        assert of_the_job(hosts)
        stopping = hosts.start(0, [*multihop, "stop", "small", *there], workplace / "stop.txt", **RAY)
        assert stopping.wait(timeout=120) == 0, (workplace / "stop.txt").read_text()
        assert following.wait(timeout=60) == 75, output.read_text()
        deadline = time.monotonic() + LEFT_S
        while left := of_the_job(hosts):
            assert time.monotonic() < deadline, (stage, left)
            time.sleep(0.5)
        # PyTorch's cache of compiled functions is a user's, not a run's.
        new = {path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")}
        assert new <= rays, (stage, list(temporary.rglob("*")))
        assert not [
            path for path in workplace.rglob("*") if path.suffix in (".tmp", ".partial") or "ray-train" in path.name
        ]
        assert set(Path("/dev/shm").iterdir()) <= memory, stage
        print(f"stopped in {stage}: nothing left")
    steps = [row["step"] for row in json_lines(run / "metrics.jsonl") if "loss" in row]
    assert steps == sorted(set(steps)) and steps[-1] == 400
