"""Ranks forked from a process that has imported everything: they have the same losses and end with their parent."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from worker_runs import STEPS, losses, recipe, wait_until

from multihop.common.errors import USER_ERROR
from multihop.pretrain.environment import SECRET
from multihop.pretrain.run.standby import ForkedRank, StandbyLost, start_rank

pytestmark = pytest.mark.ranks
Standby = tuple["subprocess.Popen[str]", str]


def begin() -> Standby:
    command = [sys.executable, "-P", "-m", "multihop.pretrain.run.standby", "a run"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.fixture(scope="module")
def standby() -> Iterator[Standby]:
    found = begin()
    yield found
    process, _ = found
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=10) == 0


def environment(rank: int = 0, world_size: int = 1, port: int = 0) -> dict[str, str]:
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        SECRET: "5a" * 32,
    }
    return {**os.environ, **{key: str(value) for key, value in own.items()}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_run(folder: Path, data: Path, steps: int = STEPS) -> Path:
    run_dir = folder / "standby"
    run_dir.mkdir()
    (run_dir / "data").symlink_to(data)
    (run_dir / "recipe.json").write_text(json.dumps(recipe(phases__0__steps=steps)))
    return run_dir


def training(standby: Standby, run_dir: Path) -> tuple[ForkedRank, psutil.Process]:
    """Return a rank that has made a step, and its process."""
    process, name = standby
    rank = start_rank(name, str(run_dir), environment())
    wait_until(lambda: losses(run_dir), None)
    (watcher,) = psutil.Process(process.pid).children()
    (forked,) = watcher.children()
    assert forked.name() == "rank 0"
    return rank, forked


def test_two_ranks_of_a_standby_have_the_losses_of_two_that_imported(
    standby: Standby, in_one_go: Path, bert_data: Path, tmp_path: Path
) -> None:
    run_dir, port = make_run(tmp_path, bert_data), free_port()
    ranks = [start_rank(standby[1], str(run_dir), environment(rank, 2, port)) for rank in (0, 1)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    assert losses(run_dir) == losses(in_one_go)


def test_its_exit_code_and_output_reach_the_parent(standby: Standby, tmp_path: Path) -> None:
    rank = start_rank(standby[1], str(tmp_path), environment())
    assert rank.wait(timeout=60) == rank.wait() == USER_ERROR
    assert "recipe.json is missing" in rank.stdout.read()


def test_a_rank_that_is_killed_says_by_what(standby: Standby, bert_data: Path, tmp_path: Path) -> None:
    rank, process = training(standby, make_run(tmp_path, bert_data, steps=100_000))
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(timeout=0.1)
    process.send_signal(signal.SIGSEGV)
    assert rank.wait(timeout=10) == -signal.SIGSEGV


def test_a_rank_is_killed_on_request(standby: Standby, bert_data: Path, tmp_path: Path) -> None:
    rank, process = training(standby, make_run(tmp_path, bert_data, steps=100_000))
    rank.kill()
    assert rank.wait(timeout=10) == -signal.SIGKILL and not process.is_running()


def test_a_rank_ends_with_the_process_that_asked_for_it(standby: Standby, bert_data: Path, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, bert_data, steps=100_000)
    ask = (
        "import sys, os; from multihop.pretrain.run.standby import start_rank\n"
        "start_rank(sys.argv[1], sys.argv[2], os.environ).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", ask, standby[1], str(run_dir)], env=environment())
    wait_until(lambda: losses(run_dir), None)
    children = psutil.Process(standby[0].pid).children(recursive=True)
    parent.kill()
    parent.wait()
    _, left = psutil.wait_procs(children, timeout=10)
    assert children and not left


def test_a_rank_ends_with_its_standby(bert_data: Path, tmp_path: Path) -> None:
    standby = begin()
    rank, process = training(standby, make_run(tmp_path, bert_data, steps=100_000))
    standby[0].kill()
    standby[0].wait()
    assert rank.wait(timeout=10) == -signal.SIGKILL
    psutil.wait_procs([process], timeout=10)
    assert not process.is_running()
    with pytest.raises(StandbyLost):
        start_rank(standby[1], str(tmp_path), environment())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_not_served(standby: Standby, tmp_path: Path) -> None:
    nobody = 65534
    ask = (
        "import os, socket, sys\n"
        f"os.setgid({nobody}); os.setuid({nobody})\n"
        "one = socket.socket(socket.AF_UNIX); one.settimeout(10); one.connect(chr(0) + sys.argv[1])\n"
        "print(one.recv(1))"
    )
    found = subprocess.run([sys.executable, "-c", ask, standby[1]], capture_output=True, text=True, timeout=60)
    assert found.stdout == "b''\n" or "ConnectionResetError" in found.stderr
