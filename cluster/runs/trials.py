"""Trials as Ray tasks. A trial that has its row in results.jsonl is skipped."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.ray.map import Resources, WorkerDiedError, map_on_ray
from common.json_lines import Row, append_row, read_rows
from eval.config import EvalConfig
from eval.predictions import write_predictions
from eval.run_trial import Outcome, failed_row, run_trial
from eval.trial import Trial, trial_key


def trials_left(trials: Sequence[Trial], results: Path) -> list[Trial]:
    """Those without a row in results.jsonl, and those that failed for a reason outside of them."""
    standing = {row["key"] for row in read_rows(results) if not row.get("retry", False)}
    return [trial for trial in trials if trial_key(trial) not in standing]


def run_trials(trials: Sequence[Trial], config: EvalConfig, results: Path, on_row: Callable[[Row], None]) -> None:
    """Run trials on the Ray that the caller has started, the longest first.

    Each row, and the predictions behind it, is on disk before `on_row` is given it. A trial that fails, or whose worker
    dies at each attempt, has a row that tells so, and the others go on.
    """
    memory = (config.memory_gb or 0) * 1e9
    ordered = sorted(trials, key=lambda trial: -trial.work)
    for outcome in map_on_ray(_attempt, ordered, _name, Resources(config.cpus, config.gpus, memory), _died):
        if outcome.predictions is not None:
            write_predictions(results.parent / "predictions", outcome.row["key"], outcome.predictions)
        append_row(results, outcome.row)
        on_row(outcome.row)


def _attempt(trial: Trial) -> Outcome:
    started = time.monotonic()
    try:
        return run_trial(trial)
    except (ValueError, OSError) as error:
        return Outcome(failed_row(trial, str(error), time.monotonic() - started, retry=True), None)


def _died(trial: Trial, error: WorkerDiedError) -> Outcome:
    return Outcome(failed_row(trial, str(error), 0.0, retry=True), None)


def _name(trial: Trial) -> str:
    return f"the trial {trial.task}, {trial.init}, seed {trial.seed}"
