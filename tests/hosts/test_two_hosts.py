"""A run over two hosts, and one fault after another: told to the user, and no loss differs."""

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from host_runs import (
    RAY,
    SAME_BUT_FOR_ROUNDING,
    assert_as_undisturbed,
    begin_on_all,
    rank_on,
    sizes,
    train,
    wait_for,
)
from network_hosts import Hosts
from workplace import json_lines, losses

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(1200)]
STEPS = 200
THRICE = pytest.mark.parametrize("time_", ["first", "second", "third"])


class Run:
    """A run of one or two ranks that goes on until it is stopped, and what the faults did to it."""

    def __init__(self, hosts: Hosts, texts: Path, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.run, self.output = folder / "runs" / "two", folder / "output.txt"
        more = ("cluster.workers=[1, 2]", "engine.hang_timeout_s=20")
        self._driver = begin_on_all(hosts, texts, folder, 100_000, *SAME_BUT_FOR_ROUNDING, *more)
        self.sizes: list[int] = []
        self.restarted(2, "start")

    def goes_on(self, fault: str) -> None:
        """It makes more steps, without a restart."""
        began, last = time.monotonic(), max(losses(self.run))
        wait_for(lambda: max(losses(self.run)) > last + 10, self.output)
        assert sizes(self.run) == self.sizes, self.output.read_text()
        print(f"{fault}: {time.monotonic() - began:.1f} s for 10 steps, no restart")

    def restarted(self, ranks: int, fault: str) -> int:
        """It is restarted with so many ranks, and makes more steps; the steps that were lost."""
        began, before = time.monotonic(), max(losses(self.run), default=0)
        self.sizes.append(ranks)
        wait_for(lambda: len(sizes(self.run)) >= len(self.sizes), self.output)
        assert sizes(self.run) == self.sizes, self.output.read_text()
        start = json_lines(self.run / "launches.jsonl")[-1]
        wait_for(lambda: max(losses(self.run), default=0) > before, self.output)
        print(f"{fault}: {time.monotonic() - began:.1f} s until the next step {json.dumps(start['seconds'])}")
        wait_for(lambda: max(losses(self.run)) > before + 30, self.output)
        return max(0, before - int(start["step"]))

    def said(self) -> str:
        """What the driver printed."""
        return self.output.read_text()

    def ends_as_undisturbed(self) -> None:
        """It is stopped, and its losses are compared."""
        self._driver.terminate()
        assert self._driver.wait(timeout=100) == 75, self.said()
        assert_as_undisturbed(self.hosts, self.folder, self.run)


@THRICE
def test_faults_of_links_and_ranks(hosts: Hosts, texts: Path, tmp_path: Path, time_: str) -> None:
    run = Run(hosts, texts, tmp_path)

    hosts.unplug(1)
    time.sleep(5)
    hosts.plug_in(1)
    run.goes_on("a link that is down for 5 s")

    hosts.slow_down(1, delay_s=0.1, loss=0.01)
    run.goes_on("200 ms and 1 % loss")
    hosts.speed_up(1)

    rank_on(hosts, 1, run.run).kill()
    assert run.restarted(2, "a rank is killed") <= 20  # a checkpoint every 10 steps, written beside the next ones

    stopped = rank_on(hosts, 0, run.run)
    stopped.suspend()
    run.restarted(2, "a rank is stopped")
    assert not stopped.is_running()

    rank_on(hosts, 1, run.run).terminate()
    assert run.restarted(2, "a rank receives SIGTERM") <= 1
    assert "one of them received SIGTERM" in run.said()

    hosts.unplug(1)
    run.restarted(1, "a link is down for good")
    assert "stopped responding" in run.said()
    run.ends_as_undisturbed()


@THRICE
def test_hosts_that_leave_and_come(hosts: Hosts, texts: Path, tmp_path: Path, time_: str) -> None:
    run = Run(hosts, texts, tmp_path)

    drain(hosts, 1, tmp_path)
    assert run.restarted(1, "a notice that a host will be taken away") <= 1
    assert "a node is about to be removed" in run.said()
    hosts.lose_power(1)
    run.goes_on("it is taken away")

    hosts.restore_power(1)
    hosts.start_ray(1, tmp_path / "ray-start-1.txt", cpus=1, **RAY)
    assert run.restarted(2, "a host joins") <= 1

    hosts.lose_power(1)
    run.restarted(1, "a host loses its power")
    hosts.restore_power(1)
    hosts.start_ray(1, tmp_path / "ray-start-1.txt", cpus=1, **RAY)
    assert run.restarted(2, "it comes back") <= 1

    for process in hosts.processes(1):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    run.restarted(1, "SIGTERM to all processes of a host")
    run.ends_as_undisturbed()


def drain(hosts: Hosts, host: int, folder: Path) -> None:
    """What an autoscaler does when the cloud tells it that a machine will be taken away."""
    address, node = f"{hosts.addresses[0]}:6379", hosts.addresses[host]
    ask = (
        f"import ray; ray.init('{address}', log_to_driver=False, logging_level='ERROR')\n"
        f"print(next(each['NodeID'] for each in ray.nodes() if each['NodeManagerAddress'] == '{node}'))"
    )
    asked = hosts.start(0, [sys.executable, "-c", ask], folder / "node.txt", **RAY)
    assert asked.wait(timeout=60) == 0, (folder / "node.txt").read_text()
    found = (folder / "node.txt").read_text().split()[-1]
    reason = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "spot",
        "--deadline-remaining-seconds",
        "90",
    ]
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "drain-node", "--address", address, "--node-id", found, *reason]
    drained = hosts.start(0, command, folder / "drain.txt", **RAY)
    assert drained.wait(timeout=60) == 0, (folder / "drain.txt").read_text()


def test_a_host_that_loses_its_power_and_comes_back(hosts: Hosts, texts: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "runs" / "two", tmp_path / "output.txt"
    driver = begin_on_all(hosts, texts, tmp_path, STEPS)
    wait_for(lambda: len(losses(run)) > 30, output)
    hosts.lose_power(1)
    wait_for(lambda: "waiting for nodes since" in output.read_text(), output)
    hosts.restore_power(1)
    hosts.start_ray(1, tmp_path / "ray-start-1.txt", cpus=1, **RAY)
    assert driver.wait(timeout=400) == 0, output.read_text()

    said = output.read_text()
    assert "restarting from step" in said and "the cluster has 2 free CPUs again" in said
    first, *_, last = json_lines(run / "launches.jsonl")
    assert first["step"] == 0 < last["step"]
    print(json.dumps(last["seconds"]))
    undisturbed = train(hosts, tmp_path, "name=undisturbed")
    assert undisturbed.wait(timeout=400) == 0, output.read_text()
    assert losses(run) == losses(tmp_path / "runs" / "undisturbed")
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
