"""Whole runs of the worker as torchrun starts it: started, watched, killed, and read."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.checkpoint.verify import newest_step

Torchrun = subprocess.Popen[bytes]
STEPS = 8


def recipe(**changes: Any) -> dict[str, Any]:
    """Return the recipe of a tiny BERT; `phases__0__lr=1` changes a key."""
    content: dict[str, Any] = {
        "seed": 5,
        "model": {"family": "bert", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64, "dropout": 0.1},
        "objective": {"name": "mlm+nsp"},
        "phases": [{"seq_len": 48, "global_batch_size": 10, "steps": STEPS, "lr": 1e-3}],
        "engine": {"deepspeed": {}, "zero_stage": 1, "micro_batch_size": 2, "log_interval": 1, "eval_interval": 4},
        "checkpoint": {"save_interval": 3, "keep": 9},
    }
    for path, value in changes.items():
        part: Any = content
        *parents, last = path.split("__")
        for parent in parents:
            part = part[int(parent)] if isinstance(part, list) else part.setdefault(parent, {})
        part[int(last) if isinstance(part, list) else last] = value
    return content


def start(run_dir: Path, data: Path, ranks: int, **changes: Any) -> Torchrun:
    """Start the run in `run_dir`, which is made if there is none; torchrun's own output goes to torchrun.log."""
    if not (run_dir / "recipe.json").exists():
        run_dir.mkdir(exist_ok=True)
        (run_dir / "data").symlink_to(data)
        (run_dir / "recipe.json").write_text(json.dumps(recipe(**changes)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    with open(run_dir / "torchrun.log", "ab") as log:
        return subprocess.Popen(
            [*command, "-m", "multihop.pretrain.run.worker", str(run_dir)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def finish(run_dir: Path, data: Path, ranks: int, **changes: Any) -> Path:
    code = start(run_dir, data, ranks, **changes).wait(timeout=300)
    assert code == 0, log_of(run_dir)
    return run_dir


def ranks_of(torchrun: Torchrun) -> list[psutil.Process]:
    """Return the ranks that torchrun has started so far, in order."""
    try:
        children = psutil.Process(torchrun.pid).children()
    except psutil.NoSuchProcess:
        return []
    return sorted((child for child in children if run_of_rank(child)), key=lambda child: child.pid)


def kill(torchrun: Torchrun) -> None:
    """Kill torchrun, its ranks and their children with SIGKILL; each rank has a process group of its own."""
    launcher = psutil.Process(torchrun.pid)
    launcher.suspend()  # it could start another rank meanwhile
    others = launcher.children(recursive=True)
    for process in [*others, launcher]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    torchrun.wait()
    _, left = psutil.wait_procs(others, timeout=60)
    assert not left


def wait_until(happened: Callable[[], Any], torchrun: "Torchrun | None", patience_s: float = 240) -> None:
    """Wait until `happened()` is true; fails after `patience_s`, or if the given torchrun ends before."""
    deadline = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < deadline and (torchrun is None or torchrun.poll() is None)
        time.sleep(0.05)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss by step; the first row of each step counts."""
    return {row["step"]: row["loss"] for row in reversed(rows(run_dir)) if "loss" in row}


def losses_of_step(run_dir: Path, step: int) -> set[float]:
    """Return the distinct losses of a step, a single one if all repetitions agree."""
    return {row["loss"] for row in rows(run_dir) if row["step"] == step and "loss" in row}


def checkpoint(run_dir: Path, step: int = STEPS) -> str:
    return folder_of_step(str(run_dir / "checkpoints"), step)


def newest(run_dir: Path) -> int:
    return newest_step(str(run_dir / "checkpoints")) or 0


def assert_same_state(one: str, other: str) -> None:
    """Assert that two ranks have the same state; the names of their files identify the runs."""
    ours, theirs = (sorted(Path(each).glob("*.safetensors")) for each in (one, other))
    assert len(ours) == len(theirs) == 2
    for mine, other_file in zip(ours, theirs, strict=True):
        assert mine.read_bytes() == other_file.read_bytes(), mine.name


def log_of(run_dir: Path, rank: int = 0) -> str:
    return (run_dir / "logs" / f"rank-{rank}.log").read_text()


def run_of_rank(process: psutil.Process) -> str:
    """Return the run directory that a rank's process was started with; empty for every other process."""
    try:
        command, forked = process.cmdline(), process.name().startswith("rank ")
    except psutil.NoSuchProcess:
        return ""
    is_rank = "multihop.pretrain.run.worker" in command or ("multihop.pretrain.run.standby" in command and forked)
    return command[-1] if is_rank else ""
