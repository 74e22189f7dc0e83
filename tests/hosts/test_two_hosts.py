"""A run over two hosts, one of which loses its power and comes back: told to the user, and no loss differs."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from network_hosts import Hosts
from workplace import json_lines, losses, make_workplace

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 200
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    try:
        found = Hosts(2)
    except OSError as error:
        pytest.skip(f"this machine or user cannot make network namespaces: {error}")
    yield found
    found.remove()


def wait_for(condition: Callable[[], Any], output: Path) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


def begin_on_both(hosts: Hosts, texts: Path, folder: Path, steps: int, *overrides: str) -> "subprocess.Popen[bytes]":
    """A run named two, with its driver on the first host; what it prints goes to output.txt."""
    make_workplace(folder, texts, "two", steps)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["data"]["sources"] = [{"path": str(texts.absolute())}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    for host in (0, 1):
        hosts.start_ray(host, folder / f"ray-start-{host}.txt", cpus=1, **RAY)
    return train(hosts, folder, *overrides)


def train(hosts: Hosts, folder: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    place = ["--runs", str(folder / "runs"), "--address", f"{hosts.addresses[0]}:6379"]
    command = [sys.executable, "-m", "cluster.cli.main", "train", str(folder / "recipe.yaml"), *overrides, *place]
    return hosts.start(0, command, folder / "output.txt", **RAY)


def test_a_run_goes_on_without_the_host_that_lost_its_power(hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "two", tmp_path / "output.txt"
    same = ("model.dropout=0", "phases[0].lr=1e-4", "phases[0].schedule=constant", "phases[0].warmup=0")
    driver = begin_on_both(hosts, texts, tmp_path, 100_000, *same, "cluster.workers=[1, 2]")
    wait_for(lambda: len(losses(run)) > 30, output)
    hosts.lose_power(1)
    lost = time.monotonic()
    last = max(losses(run))
    wait_for(lambda: max(losses(run)) > last + 10, output)
    print(f"{time.monotonic() - lost:.1f} s without training;", json_lines(run / "starts.jsonl")[-1]["seconds"])
    hosts.restore_power(1)
    hosts.start_ray(1, tmp_path / "ray-start-1.txt", cpus=1, **RAY)
    sizes = [2, 1, 2]
    wait_for(lambda: [row["world_size"] for row in json_lines(run / "starts.jsonl")] == sizes, output)
    last = max(losses(run))
    wait_for(lambda: max(losses(run)) > last + 10, output)
    driver.terminate()
    assert driver.wait(timeout=100) == 75 and "fell silent" in output.read_text()

    last = max(losses(run))
    undisturbed = train(hosts, tmp_path, *same, "name=undisturbed", "cluster.workers=1", f"phases[0].steps={last}")
    assert undisturbed.wait(timeout=300) == 0, output.read_text()
    ours, theirs = losses(run), losses(tmp_path / "runs" / "undisturbed")
    assert sorted(ours) == sorted(theirs) == list(range(1, last + 1))
    assert max(abs(ours[step] - theirs[step]) for step in ours) < 1e-3


def test_a_host_that_loses_its_power_and_comes_back(hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "two", tmp_path / "output.txt"
    driver = begin_on_both(hosts, texts, tmp_path, STEPS)
    wait_for(lambda: len(losses(run)) > 30, output)
    hosts.lose_power(1)
    wait_for(lambda: "waiting for nodes since" in output.read_text(), output)
    hosts.restore_power(1)
    hosts.start_ray(1, tmp_path / "ray-start-1.txt", cpus=1, **RAY)
    assert driver.wait(timeout=400) == 0, output.read_text()

    said = output.read_text()
    assert "restarting from step" in said and "the cluster has 2 CPUs again" in said
    first, *_, last = json_lines(run / "starts.jsonl")
    assert first["step"] == 0 < last["step"]
    print(json.dumps(last["seconds"]))
    undisturbed = train(hosts, tmp_path, "name=undisturbed")
    assert undisturbed.wait(timeout=400) == 0, output.read_text()
    assert losses(run) == losses(tmp_path / "runs" / "undisturbed")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
