"""`multihop doctor` and `submit --check` on a real cluster of two nodes, of which the second one has faults."""

import json
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from workplace import ROOT, make_workplace

from multihop.cluster.doctor.examine import make_request
from multihop.cluster.doctor.smoke_test import smoke_test
from multihop.cluster.runs.recipe import load_recipe

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
BIN = Path(sys.executable).parent
DISK = 64 * 2**20
LIMIT = 3000


@dataclass
class Cluster:
    address: str
    has_full_disk: bool


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def small_disk(folder: Path, stack: ExitStack) -> bool:
    """Mount a file system of 64 MiB at `folder`; returns whether this user may do that."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        return False
    stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=True)
    return True


def few_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose second node has another DeepSpeed, a low limit of open files and, if possible, a full disk."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before, dashboard, port = dict(os.environ), free_port(), free_port()
    fake, disk = tmp_path_factory.mktemp("fake"), tmp_path_factory.mktemp("disk")
    (fake / "deepspeed-0.1.0.dist-info").mkdir()
    (fake / "deepspeed-0.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1.0\n"
    )
    with tempfile.TemporaryDirectory(prefix="mh-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **token, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
        has_full_disk = small_disk(disk, stack)
        faulty = environment | {"PYTHONPATH": f"{fake}{os.pathsep}{ROOT / 'src'}", "TMPDIR": str(disk)}
        head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--dashboard-host=127.0.0.1"]
        head += [f"--dashboard-port={dashboard}"]
        nodes: list[subprocess.Popen[bytes]] = []

        def start(*options: str, env: dict[str, str], **named: Any) -> None:
            common = ["--num-cpus=2", f"--dashboard-agent-listen-port={free_port()}", "--object-store-memory=100000000"]
            command = [str(BIN / "ray"), "start", *options, *common, "--disable-usage-stats", "--block"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            nodes.append(subprocess.Popen(command, env=env, **quiet, **named))

        try:
            start(*head, env=environment)
            os.environ.update(token)
            url = f"http://127.0.0.1:{dashboard}"
            wait_until_it_answers(url, Path(folder))
            start(f"--address=127.0.0.1:{port}", env=faulty, preexec_fn=few_open_files)
            wait_for_nodes(f"127.0.0.1:{port}", 2)
            yield Cluster(url, has_full_disk)
        finally:
            os.environ.clear()
            os.environ.update(before)
            children = [
                process for node in nodes for process in (node, *psutil.Process(node.pid).children(recursive=True))
            ]
            for process in children:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
            for node in nodes:
                node.wait()


def wait_until_it_answers(url: str, folder: Path) -> None:
    deadline = time.monotonic() + 240
    while multihop(folder, "jobs", "--address", url).returncode != 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def wait_for_nodes(address: str, count: int) -> None:
    """Wait for the nodes in a child process.

    Ray reads RAY_AUTH_MODE when it is imported, and another test may have imported it before.
    """
    code = (
        "import ray, sys, time\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "while sum(node['Alive'] for node in ray.nodes()) < int(sys.argv[2]): time.sleep(0.2)\n"
    )
    subprocess.run([sys.executable, "-c", code, address, str(count)], timeout=240, check=True, capture_output=True)


def multihop(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "multihop.cluster.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.long
def test_the_faults_of_a_node_are_found_with_its_name(cluster: Cluster, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = multihop(tmp_path, "doctor", "--address", cluster.address, "--runs", str(runs), "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    head, other = report["nodes"]
    result = {(finding["node"], finding["check"]): finding for finding in report["findings"]}
    assert "deepspeed 0.1.0" in result[other, "version"]["seen"]
    assert f"{LIMIT} open files" in result[other, "open files"]["seen"]
    if cluster.has_full_disk:
        assert "0.1 GB of 0.1 GB free" in result[other, "disk"]["seen"]
    assert not {check for node, check in result if node == head} & {"version", "open files"}
    assert not {check for _, check in result} & {"machine", "clock", "node", "capacity", "environment"}
    for facts in report["nodes"].values():
        location = facts["stores"][str(runs)]
        assert location["same"] and location["write_rate"] > 0 and location["read_rate"] > 0
        assert all(device["wrong"] == 0 and device["flops"] > 0 for device in facts["compute"]["devices"])
    assert sum(facts["stores"][str(runs)]["created"] for facts in report["nodes"].values()) == 1
    assert [link["nodes"] for link in report["links"]] == [[head], [other], [head, other]]
    assert all(rate > 0 for link in report["links"] for rate in link["rates"].values())
    assert list(runs.iterdir()) == []  # nothing is left behind


@pytest.mark.long
def test_submit_refuses_a_cluster_with_faults(cluster: Cluster, texts: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "checked", 10)
    options = ("--address", cluster.address, "--runs", str(tmp_path / "runs"), "cluster.env=[NO_SUCH_VARIABLE]")
    tracking = f"tracking.uri=http://127.0.0.1:{free_port()}"
    refused = multihop(tmp_path, "submit", "recipe.yaml", "--check", *options, tracking)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    for part in ("version: deepspeed 0.1.0", "NO_SUCH_VARIABLE is not set", "MLflow: http://127.0.0.1"):
        assert part in refused.stdout
    assert "checked" not in multihop(tmp_path, "jobs", "--address", cluster.address).stdout


def test_this_machine_alone(tmp_path: Path) -> None:
    done = multihop(tmp_path, "doctor", "--json")
    report = json.loads(done.stdout)
    (facts,) = report["nodes"].values()
    assert done.returncode == (1 if report["findings"] else 0)
    # What the machine lacks that the tests run on is no failure of theirs.
    assert {finding["check"] for finding in report["findings"]} <= {"disk", "memory", "shm", "open files"}
    assert facts["is_head"] and "error" not in facts["compute"] and abs(facts["clock"]["ahead"]) < 60


@pytest.mark.long
def test_a_missing_source_is_a_finding_and_an_interruption_leaves_no_files(texts: Path, tmp_path: Path) -> None:
    """The check is interrupted like the job on a cluster's head, here with a Ray of this machine."""
    make_workplace(tmp_path, texts, "doc", 10)
    runs, request = tmp_path / "runs", tmp_path / "request.json"
    runs.mkdir()
    recipe = load_recipe(tmp_path / "recipe.yaml", ["data.sources[0].path=/nowhere/x.txt"])
    assert "/nowhere/x.txt" in smoke_test(recipe, runs)["error"]

    request.write_text(json.dumps(asdict(make_request(recipe, str(runs), False))))
    with open(tmp_path / "errors.txt", "wb") as errors:
        examining = subprocess.Popen(
            [sys.executable, "-m", "multihop.cluster.doctor.examine", str(request)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    deadline = time.monotonic() + 240
    while not list(runs.glob(".doctor-*")):
        assert examining.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    examining.terminate()
    assert examining.wait(120) != 0 and list(runs.iterdir()) == []
    printed = (tmp_path / "errors.txt").read_text()
    assert "KeyboardInterrupt" in printed and "SIGTERM received" not in printed  # Ray's handler prints that


def test_a_relative_folder_is_refused(tmp_path: Path) -> None:
    done = multihop(tmp_path, "doctor", "--address", "http://127.0.0.1:1", "--runs", "runs")
    assert done.returncode == 2 and "--runs=runs is relative" in done.stderr
