"""Evaluate the checkpoints of a pretraining while another process writes them.

wait until the training has started
until the checkpoint of the last step is committed:
    wait for a checkpoint that is newer than the last one evaluated, and take the newest
    run its trials that have no row, write the report, log the trials
evaluate the last checkpoint as `multihop eval` does, once the training process releases the run lock
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from multihop.cluster.console import console
from multihop.cluster.locks import is_locked, lock_folder, retry_while_in_use
from multihop.cluster.ray.session import check_answers, ray_session
from multihop.cluster.runs.evaluation import check_evaluation, list_trials
from multihop.cluster.runs.folder import check_recipe
from multihop.cluster.runs.recipe import Recipe
from multihop.cluster.runs.resolved import ResolvedRun, check_data_unchanged, resolve, store_of
from multihop.cluster.runs.stages import run_stages
from multihop.cluster.runs.summary import read_summary, summarize
from multihop.cluster.tracking.connection import store_uri
from multihop.cluster.tracking.tracker import log_concurrently
from multihop.common.errors import UserError
from multihop.common.files import make_folder
from multihop.common.json_lines import Row, read_rows
from multihop.common.storage import open_folder
from multihop.eval.tasks.known_tasks import open_tasks
from multihop.eval.trials.plan_file import Results, read_results
from multihop.pretrain.checkpoint.manifest import MANIFEST, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import list_steps
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.run.files import checkpoints_of

_POLL_S = 1.0


class _CheckpointGoneError(Exception):
    """Retention removed the checkpoint while it was evaluated."""


def evaluate_during_training(recipe: Recipe, runs: Path, allowed: Sequence[str] = (), full_verify: bool = False) -> int:
    """Evaluate each checkpoint of a run that another process trains, then the last one; returns the exit code.

    Only the run's `eval` folder is locked meanwhile, and of the run's files only those of the evaluation and the report
    are written. If several checkpoints are new, the newest is evaluated and the others are skipped.

    Args:
        allowed, full_verify: as for `run_stages`.

    Raises:
        UserError: a mistake of the user's, found before anything is started where possible; another process
            evaluates the run.
    """
    if recipe.eval.checkpoint is not None:
        raise UserError(
            f"--follow evaluates the checkpoints of the run, but eval.checkpoint={recipe.eval.checkpoint} is another "
            "model; remove one of them"
        )
    check_evaluation(recipe)
    store_uri(runs, recipe.tracking.uri)
    check_answers(recipe.cluster.address)
    folder = runs / recipe.name
    _wait_for_start(folder)
    check_recipe(folder, recipe, allowed)
    if not _is_trained(folder, recipe) and recipe.eval.tasks:
        make_folder(folder / "eval")
        with lock_folder(folder / "eval"), ray_session(recipe.cluster.address, 1):
            _evaluate_new_checkpoints(folder, recipe, runs)
    return retry_while_in_use(lambda: run_stages(recipe, runs, ("eval",), allowed, full_verify))


def _is_trained(folder: Path, recipe: Recipe) -> bool:
    checkpoints, last = checkpoints_of(folder, recipe), total_steps(recipe.phases)
    return last in list_steps(checkpoints) and _is_committed(checkpoints, last)


def _is_committed(checkpoints: str, step: int) -> bool:
    """Return whether a checkpoint has its manifest: its folder exists earlier, and may never get one if a rank was
    killed."""
    return open_folder(folder_of_step(checkpoints, step)).size(MANIFEST) is not None


def _wait_for_start(folder: Path) -> None:
    is_printed = False
    while not (folder / "recipe.json").exists():
        if not is_printed:
            console.print(f"waiting   {folder} does not exist yet; start its training with `multihop train`")
            is_printed = True
        time.sleep(_POLL_S)


def _evaluate_new_checkpoints(folder: Path, recipe: Recipe, runs: Path) -> None:
    """Evaluate new checkpoints until that of the last step is committed."""
    checkpoints, last, newest, is_printed = checkpoints_of(folder, recipe), total_steps(recipe.phases), -1, False
    while True:
        new = [step for step in list_steps(checkpoints) if step > newest and _is_committed(checkpoints, step)]
        if last in new:
            return
        if not new:
            at_work = is_locked(folder)
            if not at_work and not is_printed:
                console.print(f"waiting   no process trains {folder}; rerun `multihop train` to resume")
            is_printed = not at_work
            time.sleep(_POLL_S)
            continue
        newest = new[-1]
        _print_skipped(new[:-1], read_results(folder))
        try:
            saved = read_checkpoint_manifest(folder_of_step(checkpoints, newest))
        except UserError as error:
            console.print(f"{error}; skipped")
            continue
        run = replace(resolve(recipe, folder, store_of(recipe, runs), False, open_tasks(recipe.eval)), checkpoint=saved)
        if run.data is None:
            raise UserError(f"the texts of {folder} changed since its training started; restore the texts")
        check_data_unchanged(run, run.data, ())
        _evaluate(run)


def _print_skipped(steps: Sequence[int], results: Results) -> None:
    evaluated = {row["checkpoint_step"] for row in (*results.rows, *results.earlier) if row["init"] == "pretrained"}
    if skipped := [step for step in steps if step not in evaluated]:
        named = f"step {skipped[0]}" if len(skipped) == 1 else f"steps {', '.join(map(str, skipped))}"
        console.print(f"skipped   {named}: a newer checkpoint exists")


def _evaluate(run: ResolvedRun) -> None:
    """Run the missing trials of `run.checkpoint`; write the report and log the trials."""
    from multihop.cluster.runs.trials import final, run_missing_trials
    from multihop.eval.report.run_report import write_report

    location, trials = folder_of_step(run.checkpoints, run.step), list_trials(run)

    def check_checkpoint_exists(row: Row) -> None:
        if row.get("retry", False) and open_folder(location).size(MANIFEST) is None:
            raise _CheckpointGoneError

    console.print(f"step {run.step}: running the missing ones of {len(trials)} trials")
    try:
        run_missing_trials(trials, run.recipe.eval, run.results, lambda row: None, check_checkpoint_exists)
    except _CheckpointGoneError:
        console.print(
            f"step {run.step}: its checkpoint was removed while it was evaluated; the newest is next. Raise "
            f"checkpoint.keep={run.recipe.checkpoint.keep} to keep checkpoints longer"
        )
    for line in _scores(read_results(run.folder).rows):
        console.print(f"step {run.step}: {line}", markup=False)
    summary = summarize(run.folder, "running", read_summary(run.folder).get("stages", {}))
    write_report(run.folder, run.recipe.model_dump(mode="json"), summary)
    log_concurrently(run.folder, run.recipe.tracking.uri, final(read_rows(run.results)))


def _scores(rows: Sequence[Row]) -> list[str]:
    """Return one line for each task with a result of the checkpoint."""
    from multihop.eval.statistics.choose import choose
    from multihop.eval.statistics.formatting import spread

    medians = {
        (start.task, start.init): f"{choice.chosen.rows[0]['metric']} {spread(choice.chosen.values)}"
        for start, choice in choose(rows).items()
        if choice.chosen.rows
    }
    return [
        f"{task} {score}, random weights {medians.get((task, 'random'), 'none')}"
        for (task, init), score in medians.items()
        if init == "pretrained"
    ]
