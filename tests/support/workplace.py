"""A folder with a recipe, as a user has it, and the command line as a user types it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml
from worker_runs import run_of_rank

Command = subprocess.Popen[str]
ROOT = Path(__file__).parents[2]


def make_workplace(folder: Path, texts: Path, name: str, steps: int, **engine: Any) -> Path:
    """Write recipe.yaml of a tiny GPT-2 on two ranks into `folder`; returns `folder`."""
    recipe = {
        "name": name,
        "data": {"sources": [{"path": str(texts)}], "heldout_fraction": 0.1},
        "tokenizer": {"vocab_size": 100, "special_tokens": "gpt2"},
        "model": {"family": "gpt2", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64},
        "objective": {"name": "clm"},
        "phases": [{"seq_len": 64, "global_batch_size": 8, "steps": steps, "lr": 2e-3}],
        "engine": {"deepspeed": {}, "micro_batch_size": 4, "log_interval": 1, "eval_interval": 100_000, **engine},
        "checkpoint": {"save_interval": 10, "keep": 9},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def begin(workplace: Path, *arguments: str) -> Command:
    """Start `multihop ARGUMENTS` in the folder, with its output in output.txt."""
    with open(workplace / "output.txt", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "multihop.cluster.cli.main", *arguments],
            cwd=workplace,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def ended(workplace: Path, command: Command, code: int = 0) -> str:
    """Wait until the command ends with `code`; returns its output."""
    try:
        found = command.wait(timeout=300)
    finally:
        command.kill()
    output = (workplace / "output.txt").read_text()
    assert found == code, output
    return output


def multihop(workplace: Path, *arguments: str, code: int = 0) -> str:
    """Run the command; returns its output."""
    return ended(workplace, begin(workplace, *arguments), code)


def wait_for(condition: Callable[[], Any], workplace: Path, command: Command) -> None:
    """Wait until the condition holds; fails if the command ends before."""
    deadline = time.monotonic() + 240
    while not condition():
        if command.poll() is not None or time.monotonic() > deadline:
            command.kill()
            raise AssertionError((workplace / "output.txt").read_text())
        time.sleep(0.02)


def ranks_of(run: Path) -> list[psutil.Process]:
    """Return the training processes of a run on this machine in the order of their start, without data workers."""
    found = [process for process in psutil.process_iter() if str(run) in run_of_rank(process)]
    return [process for process in found if process.ppid() not in {other.pid for other in found}]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file; none if it does not exist yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(run: Path) -> dict[int, float]:
    """Return the loss by step; the first row of each step counts."""
    rows = json_lines(run / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in reversed(rows) if "loss" in row}
