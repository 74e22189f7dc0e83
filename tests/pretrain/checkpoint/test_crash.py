"""A writer that is killed at any moment leaves all checkpoints that it had committed, and no incomplete one."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify import list_steps, newest_good, newest_step, verify

CHILD = Path(__file__).with_name("saving_child.py")
LONGEST_LIFE_S = 0.5


def _child_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("saving_child", CHILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kills", [12, pytest.param(180, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    child, rng, seen = _child_module(), random.Random(kills), Counter[str]()
    checkpoints = str(tmp_path / "checkpoints")
    with subprocess.Popen(
        [sys.executable, str(CHILD), checkpoints], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        for _ in range(kills):
            print("go", file=server.stdin, flush=True)
            pid, announced = 0, []
            for line in server.stdout:
                what, _, number = line.strip().partition(" ")
                if what == "saved":
                    announced.append(int(number))
                if what == "pid":
                    pid = int(number)
                    time.sleep(rng.uniform(0.0, LONGEST_LIFE_S))
                    os.kill(pid, signal.SIGKILL)
                if what == "ended":
                    break
            assert pid, "the child process ended by itself"
            seen["kills"] += 1
            seen["announced"] += len(announced)
            seen["half-written folders"] += _half_written(checkpoints)
            seen["temporary files"] += len(list(tmp_path.glob("checkpoints/*/.*.tmp")))
            _check(child, checkpoints, max(announced, default=0))
        server.stdin.close()
    print(f"{dict(seen)}; the newest is of step {newest_step(checkpoints)}")
    assert seen["announced"] > 0


def _half_written(checkpoints: str) -> int:
    return sum(
        not Path(folder_of_step(checkpoints, step), "manifest.json").exists() for step in list_steps(checkpoints)
    )


def _check(child: ModuleType, checkpoints: str, announced: int) -> None:
    found, rejected = newest_good(checkpoints)
    newest = found.step if found else 0
    assert newest >= announced, rejected
    assert all("never committed" in sentence for sentence in rejected)
    kept = {step for step in range(1, newest + 1) if step > newest - child.KEEP or step % 50 == 0}
    for step in kept:
        assert verify(folder_of_step(checkpoints, step)).step == step
        assert child.is_right(checkpoints, step)
    sweep(checkpoints, found.step if found else None, f"{child.RUN[:8]}-test")
    for step in list_steps(checkpoints):  # one whose removal was interrupted too
        assert verify(folder_of_step(checkpoints, step)).step == step
    assert kept <= set(list_steps(checkpoints)) <= set(range(1, newest + 1))
    assert _half_written(checkpoints) == 0
