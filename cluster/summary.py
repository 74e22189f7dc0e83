"""summary.json: what came out of a run, in one small file, and the software and hardware it ran on."""

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_prep.files import read_json_object, write_atomically
from data_prep.rows import read_rows

_PACKAGES = ("multihop", "torch", "deepspeed", "ray", "mlflow", "pyarrow", "sentencepiece")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The summary as it stands; empty where none was written yet.

    Raises:
        ValueError: it is damaged.
    """
    path, advice = run_dir / "summary.json", "remove it: it is written anew, without the seconds of the stages so far"
    try:
        content = read_json_object(path, advice=advice)
    except FileNotFoundError:
        return {}
    stages = content.get("stages", {})
    if not isinstance(stages, dict) or not all(isinstance(seconds, int | float) for seconds in stages.values()):
        raise ValueError(f"{path} does not tell the seconds of each stage; {advice}")
    return content


def write_summary(run_dir: Path, status: str, stages: dict[str, float]) -> None:
    """Sum up metrics.jsonl and starts.jsonl.

    Args:
        status: running, stopped, failed or done.
        stages: seconds spent in each stage so far, over all starts.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    steps = {row["step"]: row for row in reversed(rows) if "loss" in row}  # the first row of a step wins
    heldout = {row["step"]: row for row in reversed(rows) if "heldout_loss" in row}
    last = steps[max(steps)] if steps else {}
    last_heldout = heldout[max(heldout)] if heldout else {}
    starts = read_rows(run_dir / "starts.jsonl")
    summary = {
        "status": status,
        "steps": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "train_loss": last.get("token_loss"),
        **{name: last_heldout.get(name) for name in ("heldout_loss", "unigram_loss", "uniform_loss")},
        **{name: value for name, value in last_heldout.items() if name.startswith(("heldout_nsp", "heldout_sop"))},
        "tokens_per_s": _median(steps.values(), "tokens_per_s"),
        "tflops_per_s": _median(steps.values(), "tflops_per_s"),
        "mfu": _median(steps.values(), "mfu"),
        "skipped": last.get("skipped", 0),
        "data_wait": _median(steps.values(), "data_wait"),
        "stages": {name: round(seconds, 1) for name, seconds in stages.items()},
        "restarts": max(0, len(starts) - 1),
        "environment": environment() | ({"device": starts[-1]["device"]} if starts else {}),
    }
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=1).encode() + b"\n")


def _median(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]  # an older version's rows have fewer keys
    return statistics.median(values) if values else None


def environment() -> dict[str, Any]:
    """Versions, commit and machine."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
    }


def _commit() -> str | None:
    """The commit of the code that runs; None where it is not run from a git checkout."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
