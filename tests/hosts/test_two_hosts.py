"""A run over two hosts, one of which loses its power and comes back: told to the user, and no loss differs."""

import json
import shutil
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


def test_a_host_that_loses_its_power_and_comes_back(hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "two", STEPS)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["data"]["sources"] = [{"path": str(texts.absolute())}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run, output = tmp_path / "runs" / "two", tmp_path / "output.txt"
    for host in (0, 1):
        hosts.start_ray(host, tmp_path / f"ray-start-{host}.txt", cpus=1, **RAY)
    recipe_path, address = str(tmp_path / "recipe.yaml"), f"{hosts.addresses[0]}:6379"
    place = [recipe_path, "--runs", str(tmp_path / "runs"), "--address", address]
    driver = hosts.start(0, [sys.executable, "-m", "cluster.cli.main", "train", *place], output, **RAY)
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
    again = [recipe_path, "name=undisturbed", *place[1:]]
    undisturbed = hosts.start(0, [sys.executable, "-m", "cluster.cli.main", "train", *again], output, **RAY)
    assert undisturbed.wait(timeout=400) == 0, output.read_text()
    assert losses(run) == losses(tmp_path / "runs" / "undisturbed")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
