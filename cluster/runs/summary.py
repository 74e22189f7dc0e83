"""Writes summary.json: the results of a run, and the software and hardware that it ran on."""

import json
import os
import platform
import statistics
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from multihop.cluster.runs.code_version import commit_label
from multihop.common.errors import UserError
from multihop.common.files import read_json_object, write_atomically
from multihop.common.json_lines import Row, read_rows
from multihop.common.machine import cpu_model
from multihop.eval.report.run_metrics import HEALTH, LOSS, PARTS, REFERENCES, diagnosis, heldout
from multihop.pretrain.run.audits import first_different_step
from multihop.pretrain.run.files import AUDITS

_PACKAGES = ("multihop", "torch", "deepspeed", "ray", "mlflow", "pyarrow", "sentencepiece", "tokenizers")


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Return the summary; empty if none was written yet.

    Raises:
        UserError: it is damaged.
    """
    path, advice = run_dir / "summary.json", "remove it: it is rewritten, without the seconds of past starts"
    try:
        content = read_json_object(path, advice=advice)
    except FileNotFoundError:
        return {}
    stages = content.get("stages", {})
    if not isinstance(stages, dict) or not all(isinstance(seconds, int | float) for seconds in stages.values()):
        raise UserError(f"{path}: stages does not map stage names to seconds; {advice}")
    return content


def write_summary(run_dir: Path, status: str, stages: dict[str, float]) -> None:
    """Write `summarize` into the run's folder."""
    _write(run_dir, summarize(run_dir, status, stages))


def write_audits(run_dir: Path) -> None:
    """Bring the summary of a run that is not in progress up to date, for its audits: one that was killed wrote none at
    its end. Its environment stays."""
    old = read_summary(run_dir)
    new = summarize(run_dir, old.get("status", "running"), old.get("stages", {}))
    _write(run_dir, new | {"environment": old.get("environment", new["environment"])})


def _write(run_dir: Path, summary: dict[str, Any]) -> None:
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=1).encode() + b"\n")


def summarize(run_dir: Path, status: str, stages: dict[str, float]) -> dict[str, Any]:
    """Summarize metrics.jsonl and launches.jsonl.

    Args:
        status: running, stopped, failed or done.
        stages: seconds spent in each stage so far, over all starts.
    """
    rows = read_rows(run_dir / "metrics.jsonl")
    logged = {row["step"]: row for row in reversed(rows) if LOSS in row}  # the first row of a step counts
    evaluated = {row["step"]: row for row in reversed(rows) if heldout(LOSS) in row}
    last = logged[max(logged)] if logged else {}
    last_heldout = evaluated[max(evaluated)] if evaluated else {}
    launches = read_rows(run_dir / "launches.jsonl")
    return {
        "status": status,
        "steps": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "train_loss": last.get(LOSS),
        **{name: last[name] for name in PARTS if name in last},
        heldout(LOSS): last_heldout.get(heldout(LOSS)),
        **{heldout(name): last_heldout[heldout(name)] for name in PARTS if heldout(name) in last_heldout},
        **{name: last_heldout.get(name) for name in REFERENCES},
        **{name: last_heldout[name] for name in HEALTH if name in last_heldout},
        "diagnosis": diagnosis(rows),
        "tokens_per_s": _median(logged.values(), "tokens_per_s"),
        "tflops_per_s": _median(logged.values(), "tflops_per_s"),
        "mfu": _median(logged.values(), "mfu"),
        "skipped": last.get("skipped", 0),
        "data_wait": _median(logged.values(), "data_wait"),
        "stages": {name: round(seconds, 1) for name, seconds in stages.items()},
        "launches": len(launches),
        "audits": audits_of(run_dir),
        "environment": environment() | ({"device": launches[-1]["device"]} if launches else {}),
    }


def audits_of(run_dir: Path) -> list[Row]:
    """Return what audits.jsonl says of each audit: the steps and the checkpoint's hash, whether all bits are equal,
    what was not the same in the replay, the first step whose state differs, and if it was judged, whether the
    differences are within rounding."""
    keys = "first", "last", "is_equal", "conditions", "of"
    return [
        {key: row[key] for key in keys}
        | {"first_different_step": first_different_step(row)}
        | ({"rounding": row["rounding"]} if row.get("rounding") is not None else {})  # older versions did not judge
        for row in read_rows(run_dir / AUDITS)
    ]


def _median(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]  # rows of older versions have fewer keys
    return statistics.median(values) if values else None


def environment() -> dict[str, Any]:
    """Return the package versions, commit and machine."""
    return {
        "commit": commit_label(),
        "python": platform.python_version(),
        **{name: version(name) for name in _PACKAGES},
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
    }
