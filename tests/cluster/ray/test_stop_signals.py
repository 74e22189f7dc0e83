"""How a driver handles signals."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from workplace import make_workplace

PROGRAM = """
import os, sys
from pathlib import Path
from multihop.cluster.ray.train_driver import stop_file_on_signals

stop = Path(sys.argv[1])
with stop_file_on_signals(stop):
    for number in map(int, sys.argv[2:]):
        os.kill(os.getpid(), number)
    assert stop.exists()
"""


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_sent_twice_at_once_is_one(tmp_path: Path, second: signal.Signals) -> None:
    """`timeout` signals the command and its group, which would lose the steps since a checkpoint if counted twice."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "stop"), str(int(signal.SIGTERM)), str(int(second))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stopping after this step") == 1


CONVERTED = """
import os, signal, sys
from multihop.cluster.cli.failures import exit_with
from multihop.cluster.interrupts import interrupt_on_signals

def work():
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except KeyboardInterrupt as error:
        raise TypeError("bad argument") from error

interrupt_on_signals()
exit_with(work)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_that_a_library_turns_into_another_error_is_one(number: signal.Signals) -> None:
    command = [sys.executable, "-c", CONVERTED, str(int(number))]
    restored = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **restored)
    assert (done.returncode, done.stderr) == (
        75,
        "\nmultihop: stopped (TypeError: bad argument); rerun the same command to resume\n",
    )


LOST = """
import os, signal
from pathlib import Path
from multihop.cluster.cli.failures import exit_with
from multihop.cluster.interrupts import interrupt_on_signals
from multihop.cluster.runs.recipe import load_recipe
from multihop.cluster.runs.stages import run_stages

recipe, runs = load_recipe(Path("recipe.yaml"), []), Path("runs")
run_stages(recipe, runs, ("prep",))
interrupt_on_signals()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    pass
exit_with(lambda: run_stages(recipe, runs))
"""


@pytest.mark.long
@pytest.mark.ranks
def test_a_run_ends_before_its_next_stage_if_a_library_has_lost_an_interruption(texts: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "lost", steps=2)
    command = [sys.executable, "-c", LOST]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (
        75,
        ["multihop: stopped; rerun the same command to resume"],
    ), done.stderr
    assert not (tmp_path / "runs" / "lost" / "metrics.jsonl").exists()
