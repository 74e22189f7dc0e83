"""Runs the missing trials and examples of a model's evaluation as Ray tasks."""

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multihop.cluster.console import console, progress_line
from multihop.cluster.ray import WorkerDiedError
from multihop.cluster.ray.map import Resources, map_on_ray
from multihop.cluster.remote.node_cache import RemoteRunSpec, fetch_data
from multihop.cluster.runs.evaluation import select_examples, weights_dir
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.common.errors import UserError
from multihop.common.files import make_folder, open_append, remove_temporaries, write_atomically
from multihop.common.json_lines import Row, append_row, read_rows
from multihop.common.redaction import safe_text
from multihop.eval.config import EvalConfig
from multihop.eval.inference.examples import FILE as EXAMPLES
from multihop.eval.inference.examples import make_examples, read_examples
from multihop.eval.report.run_report import examples_context
from multihop.eval.trials.plan_file import make_plan, read_plan, write_plan
from multihop.eval.trials.run_trial import Outcome, run_trial
from multihop.eval.trials.start_from import next_wave, remove_unneeded
from multihop.eval.trials.trial import Trial, failed_row, trial_key, trial_name
from multihop.eval.trials.write_predictions import write_predictions

OnRow = Callable[[Row], None]

FAILURES = "failures.log"
"""Name of the file beside results.jsonl with the tracebacks of failed trials."""
PREDICTIONS = "predictions"
"""Name of the folder beside results.jsonl with the predictions behind each row."""
_LONGEST_ERROR = 500


@dataclass(frozen=True)
class _Failure:
    """A trial without a result, for a reason that may not recur in a rerun."""

    trial: Trial
    error: str
    traceback: str
    """Empty if its worker died."""
    seconds: float


def trial_resources(config: EvalConfig, on_this_node: bool) -> Resources:
    """Return the resources that Ray reserves for a trial, or for making the examples.

    Args:
        on_this_node: whether it needs files of this node.
    """
    return Resources(config.cpus, config.gpus, (config.memory_gb or 0) * 1e9, on_this_node)


def run_missing_trials(
    trials: Sequence[Trial],
    config: EvalConfig,
    results: Path,
    on_row: OnRow,
    before_row: OnRow = lambda row: None,
    remote: RemoteRunSpec | None = None,
    examples: str | None = None,
) -> int:
    """Run the trials that have no row in results.jsonl, on the Ray that the caller has started.

    The plan is written first: readers of the results select the rows of the trials in it.

    Args:
        on_row: called with each row when it is on disk.
        before_row: called with each row before it is written; may raise to end all trials.
        remote: the run in an object store whose data set each node fetches.
        examples: the key of the recipe's examples; None if it has none.

    Returns:
        The number of trials that failed for a reason that may not recur in a rerun.
    """
    done, total, tried = 0, 0, set[str]()
    to_retry: list[str] = []
    weights, predictions = weights_dir(results), results.parent / PREDICTIONS
    for folder in (results.parent, predictions, *predictions.glob("*/"), weights):
        remove_temporaries(folder)  # of killed workers and drivers: no trial is running
    with progress_line("evaluate ") as line:

        def show(row: Row) -> None:
            nonlocal done
            done += 1
            on_row(row)
            name = trial_name(row)
            if row["status"] != "ok":
                console.print(f"trial {name} failed: {row['error']}", markup=False)
            if row.get("retry", False):
                to_retry.append(f"  {name}: {row['error']}")
            value = f"{row['metric']} {row['value']:.3f}" if row["status"] == "ok" else "failed"
            line.update(done, total, f"{name}: {value}")

        while True:
            rows = read_rows(results)
            write_plan(results.parent.parent, make_plan(trials, rows, config, examples))
            remove_unneeded(weights, trials, rows, tried)
            wave = next_wave(trials, rows, tried)
            if not (wave.trials or wave.failed):
                break
            total += len(wave.trials) + len(wave.failed)
            line.update(done, total)
            for row in wave.failed:
                append_row(results, row)
                show(row)
            run_trials(wave.trials, config, results, show, before_row, remote)
            tried |= {trial_key(trial) for trial in wave.trials} | {row["key"] for row in wave.failed}
    if to_retry:
        log = results.parent / FAILURES
        seen = f" (tracebacks in {log})" if log.exists() else ""
        console.print(f"{len(to_retry)} of {total} trials failed{seen}; rerun the same command to try them again:")
        console.print("\n".join(to_retry), markup=False)
    return len(to_retry)


def run_trials(
    trials: Sequence[Trial],
    config: EvalConfig,
    results: Path,
    on_row: OnRow,
    before_row: OnRow = lambda row: None,
    remote: RemoteRunSpec | None = None,
) -> None:
    """Run trials on the Ray that the caller has started, the longest first.

    Each row, and the predictions behind it, is on disk before `on_row` is called. A trial that fails, or whose worker
    dies at each attempt, gets a row with its error, and the others go on.
    """
    # Weights that others start from are files of this node.
    on_this_node = remote is not None and any(trial.weights_dir is not None for trial in trials)
    resources = trial_resources(config, on_this_node)
    ordered = sorted(trials, key=lambda trial: -trial.work)
    succeeded = {row["key"] for row in read_rows(results) if row["status"] == "ok"}
    for outcome in map_on_ray(
        lambda trial: _attempt(trial, remote), ordered, _name, resources, _failure_of_dead_worker
    ):
        if isinstance(outcome, _Failure):
            row, predictions = failed_row(outcome.trial, outcome.error, outcome.seconds, retry=True), None
            _keep_traceback(results.parent / FAILURES, row, outcome.traceback)
        else:
            row, predictions = outcome.row, outcome.predictions
        before_row(row)
        if predictions is not None:
            sha256 = write_predictions(results.parent / PREDICTIONS, row["key"], predictions)
            row |= {"predictions_sha256": sha256}
        # One that ran again for its weights alone keeps the result that it has.
        if not (row.get("retry", False) and row["key"] in succeeded):
            append_row(results, row)
        on_row(row)


def final(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those of trials that are tried again: MLflow has one nested run for each trial."""
    return [row for row in rows if not row.get("retry", False)]


def make_missing_examples(run: ResolvedRun) -> None:
    """Make and write the examples that the run does not have yet, on the Ray that the caller has started.

    Raises:
        UserError: as `make_examples`.
        WorkerDiedError: as `map_on_ray`.
    """
    examples, config = select_examples(run), run.recipe.eval
    if examples is None or read_examples(run.results.parent, examples.key) is not None:
        return
    resources = trial_resources(config, on_this_node=run.remote is not None)
    (made,) = map_on_ray(make_examples, [examples], lambda _: "the examples", resources)
    content = json.dumps(made, ensure_ascii=False, indent=1).encode() + b"\n"
    write_atomically(run.results.parent / EXAMPLES, content)


def print_examples(run: ResolvedRun) -> None:
    """Print what the model makes of each text before and after pretraining."""
    plan = read_plan(run.folder)
    made = read_examples(run.results.parent, plan.examples) if plan else None
    for text, before, after in examples_context(made)["examples"]:
        console.print(safe_text(f"example   {text}\n  before  {before}\n  after   {after}"))


def _attempt(trial: Trial, remote: RemoteRunSpec | None) -> Outcome | _Failure:
    started = time.monotonic()
    try:
        if remote is None:
            return run_trial(trial)
        with fetch_data(remote, training=False) as data:
            local: dict[str, Any] = {
                "tokenizer_path": str(data / Path(trial.tokenizer_path).name),
                "data_path": str(data),
            }
            if trial.target_tokenizer_path is not None:
                local["target_tokenizer_path"] = str(data / Path(trial.target_tokenizer_path).name)
            return run_trial(replace(trial, **local))
    except Exception as error:
        return _Failure(trial, _one_line(error), traceback.format_exc(), time.monotonic() - started)


def _one_line(error: Exception) -> str:
    """Return the message of an error for a user; for another error, its type and the beginning of its message."""
    if isinstance(error, UserError | OSError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]


def _failure_of_dead_worker(trial: Trial, error: WorkerDiedError) -> _Failure:
    return _Failure(trial, str(error), "", 0.0)


def _keep_traceback(path: Path, row: Row, text: str) -> None:
    if text:
        make_folder(path.parent)
        with open_append(path) as file:
            file.write(f"trial {trial_name(row)}, key {row['key']}\n{text}\n".encode(errors="replace"))


def _name(trial: Trial) -> str:
    return f"the trial {trial.task}, {trial.init}, seed {trial.seed}"
