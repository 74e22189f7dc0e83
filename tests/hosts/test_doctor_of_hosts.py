"""`multihop doctor` on three hosts: a link that is cut, and hosts that are slow, gone, or have a wrong clock."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from network_hosts import Hosts

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(1200)]
RAY = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5a" * 32}
CGROUP = Path("/sys/fs/cgroup/cpu")
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
"""Debian's libfaketime, which changes the time of day that a process reads."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip (iproute2)")
    try:
        found = Hosts(3)
    except OSError as error:
        pytest.skip(f"this machine or user cannot make network namespaces: {error}")
    try:
        for host in range(3):
            found.start_ray(host, tmp_path_factory.mktemp("start") / f"{host}.txt", cpus=1, **RAY)
        yield found
    finally:
        found.remove()


def examine(hosts: Hosts, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the report of the command on the head."""
    command = [sys.executable, "-m", "multihop.cluster.cli.main", "doctor", "--runs", str(folder / "runs"), "--json"]
    with open(folder / "report.json", "w") as output:
        done = subprocess.run(
            ["ip", "netns", "exec", hosts.names[0], *command],
            env=hosts.environment(RAY_ADDRESS=f"{hosts.addresses[0]}:6379", **RAY),
            stdin=subprocess.DEVNULL,
            stdout=output,
            timeout=900,
        )
    return done.returncode, json.loads((folder / "report.json").read_text())


def name_of(report: dict[str, Any], address: str) -> str:
    return next(name for name, facts in report["nodes"].items() if facts["address"] == address)


def test_a_link_that_is_cut_is_found_with_both_ends(hosts: Hosts, tmp_path: Path) -> None:
    hosts.cut(1, 2)
    try:
        code, report = examine(hosts, tmp_path)
    finally:
        hosts.mend(1, 2)
    print(json.dumps(report["findings"], indent=1))
    ends = [name_of(report, hosts.addresses[host]) for host in (1, 2)]
    failed = [link["nodes"] for link in report["links"] if "error" in link]
    assert code == 1 and failed == [ends]
    cut = [finding for finding in report["findings"] if "all-reduce failed" in finding["seen"]]
    assert [finding["node"] for finding in cut] == [" - ".join(ends)]


def test_a_slow_host_is_found(hosts: Hosts, tmp_path: Path) -> None:
    group = CGROUP / f"{hosts.names[2]}-slow"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("10000")  # of each 100,000
    except OSError as error:
        pytest.skip(f"this machine or user cannot limit processors by cgroup v1: {error}")
    try:
        for process in hosts.processes(2):
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                (group / "cgroup.procs").write_text(str(process.pid))
        code, report = examine(hosts, tmp_path)
        print(json.dumps(report, indent=1))
        slow = name_of(report, hosts.addresses[2])
        assert code == 1 and (slow, "compute") in {(each["node"], each["check"]) for each in report["findings"]}
        rates = {name: facts["compute"]["devices"][0]["flops"] for name, facts in report["nodes"].items()}
        assert min(rates, key=lambda name: rates[name]) == slow
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (CGROUP / "cgroup.procs").write_text(pid)
        group.rmdir()


def test_a_host_that_lost_its_power_is_found(hosts: Hosts, tmp_path: Path) -> None:
    """Ray may have noticed or not."""
    hosts.lose_power(1)
    code, report = examine(hosts, tmp_path)
    print(json.dumps(report["findings"], indent=1))
    named = {each["check"] for each in report["findings"] if hosts.addresses[1] in each["node"]}
    assert code == 1 and named & {"node", "machine"}


def test_a_wrong_clock_is_found(hosts: Hosts, tmp_path: Path) -> None:
    """The last test of these hosts: the one without power comes back with another time of day."""
    if not FAKETIME:
        pytest.skip("a host with a wrong clock needs Debian's package libfaketime")
    hosts.restore_power(1)
    wrong = {"LD_PRELOAD": str(FAKETIME[0]), "FAKETIME": "+7s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    hosts.start_ray(1, tmp_path / "start.txt", cpus=1, **wrong, **RAY)
    code, report = examine(hosts, tmp_path)
    print(json.dumps(report["findings"], indent=1))
    clocks = [each for each in report["findings"] if each["check"] == "clock"]
    assert code == 1 and [each["node"] for each in clocks] == [name_of(report, hosts.addresses[1])]
    seconds, _, direction = clocks[0]["seen"].split()
    assert 6 < float(seconds) < 8 and direction == "ahead"
