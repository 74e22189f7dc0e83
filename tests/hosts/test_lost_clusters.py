"""A submitted run whose driver is killed, and whose whole cluster is lost: submitted again, it goes on where it was."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from host_runs import RAY, SAME_BUT_FOR_ROUNDING, assert_as_undisturbed, sizes, wait_for
from network_hosts import Hosts
from workplace import json_lines, losses, make_workplace

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 400


@pytest.mark.parametrize("time_", ["first", "second", "third"])
def test_it_is_submitted_again(hosts: Hosts, texts: Path, tmp_path: Path, time_: str) -> None:
    run, output = tmp_path / "runs" / "two", tmp_path / "follow.txt"
    make_workplace(tmp_path, texts, "two", STEPS)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["data"]["sources"] = [{"path": str(texts.absolute())}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    environment = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **RAY}

    def start_ray(host: int) -> None:
        hosts.start_ray(host, tmp_path / f"ray-{host}.txt", cpus=1, dashboard=True, **environment)

    def submit() -> "subprocess.Popen[bytes]":
        place = ["--runs", str(tmp_path / "runs"), "--address", "http://127.0.0.1:8265", "--stage", "train"]
        changes = ["cluster.workers=[1, 2]", *SAME_BUT_FOR_ROUNDING]
        command = [sys.executable, "-m", "multihop.cluster.cli.main", "submit", str(tmp_path / "recipe.yaml")]
        return hosts.start(0, [*command, *changes, *place], output, **environment)

    def goes_on(following: "subprocess.Popen[bytes]", starts: list[int]) -> int:
        """Until it has made some more steps, with so many ranks in its starts. The last step."""
        wait_for(lambda: following.poll() is not None or len(sizes(run)) == len(starts), output)
        assert sizes(run) == starts, output.read_text()
        begun = max(losses(run), default=0)
        wait_for(lambda: following.poll() is not None or max(losses(run), default=0) > begun + 30, output)
        assert following.poll() is None, output.read_text()
        return max(losses(run))

    for host in (0, 1):
        start_ray(host)
    following = submit()
    goes_on(following, [2])
    (driver,) = [
        each for each in hosts.processes(0) if {"multihop.cluster.cli.main", "train"} < set(each.cmdline()[:4])
    ]
    driver.kill()
    assert following.wait(timeout=120) == 1, output.read_text()

    following = submit()
    goes_on(following, [2, 2])
    for host in (0, 1):
        for process in hosts.processes(host):
            if process.pid != following.pid:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    start_ray(0)  # it does not know of the job
    assert following.wait(timeout=180) == 76, output.read_text()
    assert submit().wait(timeout=300) == 0, output.read_text()
    assert sizes(run) == [2, 2, 1] and "two is done" in output.read_text()
    steps = [row["step"] for row in json_lines(run / "launches.jsonl")]
    assert 0 == steps[0] < steps[1] < steps[2]
    assert_as_undisturbed(hosts, tmp_path, run)
