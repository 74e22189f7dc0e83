"""Signals while Ray starts on this machine: the command ends, whenever they come."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
STARTS_RAY = """
import signal, sys, time
from cluster.ray.session import ray_session

def interrupt(number, frame):
    raise KeyboardInterrupt

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, interrupt)
print("starts", flush=True)
try:
    with ray_session(None, 1):
        print("started", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(75)
"""
SOME = [(0.1, signal.SIGINT), (0.5, signal.SIGINT), (0.7, signal.SIGTERM)]
ALL = [(number / 100, kind) for number in range(100) for kind in (signal.SIGINT, signal.SIGTERM)]
"""When, as a part of the time that a start takes, and which."""


def begin() -> "subprocess.Popen[str]":
    """A program that is about to start Ray, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS_RAY],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "starts\n"
    return process


def processes_of(group: int) -> list[psutil.Process]:
    """The living processes of a session: Ray's are in groups of their own."""
    return [each for each in psutil.process_iter() if _session_of(each.pid) == group]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


@pytest.fixture(scope="module")
def start_s() -> float:
    """Seconds that a start of Ray takes that nobody disturbs."""
    process, began = begin(), time.monotonic()
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    seconds = time.monotonic() - began
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    return seconds


def interrupted(moment_s: float, kind: signal.Signals) -> Iterator[str]:
    """What is wrong with a program that gets a signal, as a terminal and `timeout` send it: to its process group."""
    process = begin()
    time.sleep(moment_s)
    os.killpg(process.pid, kind)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        yield "it did not end"
        process.kill()
        output, _ = process.communicate()
    if process.returncode != 75:
        yield f"exit code {process.returncode}"
    if "Traceback" in output or "Exception ignored" in output:
        yield output
    _, alive = psutil.wait_procs(processes_of(process.pid), timeout=30)
    if alive:
        yield f"it left {alive}"
        for each in alive:
            each.kill()


@pytest.mark.parametrize(("part", "kind"), SOME)
def test_a_signal_while_ray_starts_ends_the_command(part: float, kind: signal.Signals, start_s: float) -> None:
    assert list(interrupted(part * start_s, kind)) == []


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_two_hundred_signals_end_two_hundred_starts(start_s: float) -> None:
    found = {(part, kind.name): wrong for part, kind in ALL if (wrong := list(interrupted(part * start_s, kind)))}
    assert found == {}
