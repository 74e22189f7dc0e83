"""Trials as Ray tasks: those whose row stands already are skipped, those whose worker dies are run again."""

from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.prep import map_on_ray
from data_prep.rows import Row, append_row, read_rows
from eval.trial import Trial, run_trial, trial_key


def trials_left(trials: Sequence[Trial], results: Path) -> list[Trial]:
    """Those without a row in results.jsonl."""
    standing = {row["key"] for row in read_rows(results)}
    return [trial for trial in trials if trial_key(trial) not in standing]


def run_trials(trials: Sequence[Trial], results: Path, on_row: Callable[[Row], None]) -> None:
    """Run trials on the Ray that the caller has started; each row is on disk before `on_row` is given it."""
    for row in map_on_ray(run_trial, trials):
        append_row(results, row)
        on_row(row)
