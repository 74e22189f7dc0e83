"""Signals while Ray starts on this machine end the command, whenever they come."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from workplace import make_workplace

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
SOME = [(0.5, signal.SIGINT)]
ALL = [(number / 26, kind) for number in range(25) for kind in (signal.SIGINT, signal.SIGTERM)]
"""Moments, as a share of the time that a start takes, each with a signal."""


def begin(folder: Path) -> "subprocess.Popen[str]":
    """Start `multihop train` in a process group of its own, and return once it has started Ray's first process.

    It would train for hours, so that it still runs when a signal comes late because Ray has started early.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "multihop.cluster.cli.main", "train", "recipe.yaml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Shells ignore SIGINT in what they start in the background, which may include the tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while process.poll() is None and not psutil.Process(process.pid).children():
        time.sleep(0.01)
    return process


def processes_of(group: int) -> list[psutil.Process]:
    """Return the living processes of a session, because those of Ray are in groups of their own."""
    return [each for each in psutil.process_iter() if _session_of(each.pid) == group]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid) if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else None
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None


@pytest.fixture(scope="module")
def folder(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe."""
    return make_workplace(tmp_path_factory.mktemp("workplace"), texts, "interrupted", steps=10**6)


@pytest.fixture(scope="module")
def start_s(folder: Path) -> float:
    """Number of seconds that an uninterrupted start of Ray takes."""
    process, began = begin(folder), time.monotonic()
    assert process.stdout is not None and process.stdout.readline().startswith("prepare")
    seconds = time.monotonic() - began
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 75
    shutil.rmtree(folder / "runs")
    return seconds


def interrupted(folder: Path, moment_s: float, kind: signal.Signals) -> Iterator[str]:
    """Yield what is wrong after the command got SIGINT to its group, as from a terminal, or SIGTERM, as from `kill`."""
    process = begin(folder)
    time.sleep(moment_s)
    if kind == signal.SIGINT:
        os.killpg(process.pid, kind)
    else:
        process.send_signal(kind)
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        yield "it did not end"
        process.kill()
        output, _ = process.communicate()
    if process.returncode != 75:
        yield f"exit code {process.returncode}: {output[-2000:]}"
    if "Traceback" in output or "Exception ignored" in output:
        yield output
    _, alive = psutil.wait_procs(processes_of(process.pid), timeout=120)
    if alive:
        yield f"it left {alive}"
        for each in alive:
            each.kill()


@pytest.mark.parametrize(("part", "kind"), SOME)
def test_a_signal_while_ray_starts_ends_the_command(
    part: float, kind: signal.Signals, folder: Path, start_s: float
) -> None:
    assert list(interrupted(folder, part * start_s, kind)) == []


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_fifty_starts_end_on_a_signal(folder: Path, start_s: float) -> None:
    result = {}
    for part, kind in ALL:
        shutil.rmtree(folder / "runs", ignore_errors=True)
        if wrong := list(interrupted(folder, part * start_s, kind)):
            result[part, kind.name] = wrong
    assert result == {}
