"""The stages of a run: prepare, pretrain, evaluate, report. What is done already is not done again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.cluster.console import console, progress_line
from multihop.cluster.interrupts import raise_if_interrupted
from multihop.cluster.locks import wait_for_lock
from multihop.cluster.ray.session import check_answers, ray_session
from multihop.cluster.remote.remote_run import RemoteRun
from multihop.cluster.runs.background_audits import background_audits
from multihop.cluster.runs.evaluation import check_evaluation, is_evaluation_done, list_trials, select_examples
from multihop.cluster.runs.folder import locked_run_dir
from multihop.cluster.runs.plan_training import plan_training
from multihop.cluster.runs.prepared import get_or_prepare_dataset, link_dataset
from multihop.cluster.runs.recipe import Recipe
from multihop.cluster.runs.resolved import ResolvedRun, check_data_unchanged, resolve, store_of, with_newest_checkpoint
from multihop.cluster.runs.summary import environment, read_summary, write_summary
from multihop.cluster.tracking.connection import check_access, store_uri
from multihop.cluster.tracking.tracker import is_behind, open_run
from multihop.common.errors import DONE, FAILED, STOPPED, UserError
from multihop.common.json_lines import read_rows
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.tokenizers.existing import check_objective, check_same_tokenizer
from multihop.eval.report.run_metrics import diagnosis
from multihop.eval.trials.plan_file import read_results
from multihop.pretrain.checkpoint.huggingface_import import is_huggingface
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.data.word_vectors import build_word_vectors
from multihop.pretrain.environment import MLFLOW_RUN_ID
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.run.audits import audits_due
from multihop.pretrain.run.check_parent import check_parent
from multihop.pretrain.run.check_start import check_checkpoints_exist, check_init_keys

if TYPE_CHECKING:
    from multihop.cluster.tracking.tracker import Tracker

STAGES = ("prep", "train", "eval")


class _Seconds:
    """Seconds spent in each stage, over all starts of the run."""

    def __init__(self, so_far: dict[str, float]) -> None:
        self.by_stage = dict(so_far)

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.by_stage[stage] = self.by_stage.get(stage, 0.0) + time.monotonic() - started


def run_stages(
    recipe: Recipe,
    runs: Path,
    wanted: Sequence[str] = STAGES,
    allowed: Sequence[str] = (),
    full_verify: bool = False,
    remote: RemoteRun | None = None,
) -> int:
    """Run those of these stages that are not done; returns the exit code.

    Args:
        allowed: dotted keys that may change under a run that was started before.
        full_verify: hash every file of the data set, also those that are unchanged by size and modification time.
        remote: the run in an object store; `runs` is this node's copy.

    Raises:
        UserError: a mistake of the user's, found before anything is started where possible.
    """
    if remote and recipe.checkpoint.audit:
        raise UserError(
            "checkpoint.audit: a run in an object store does not audit itself; remove it, and use `multihop "
            "checkpoints audit` when the run has ended"
        )
    tasks = check_evaluation(recipe) if "eval" in wanted else ()
    tracking_uri = store_uri(runs, recipe.tracking.uri)
    check_answers(recipe.cluster.address)
    folder = runs / recipe.name
    with locked_run_dir(folder, recipe, allowed):
        run = resolve(recipe, folder, store_of(recipe, runs), full_verify, tasks, remote)
        if "train" in wanted and run.checkpoint is None:
            check_checkpoints_exist(folder, run.checkpoints)
            # Whether a Hugging Face model has the output layer is known only when its weights are read.
            parent = recipe.model.init_from
            check_init_keys(recipe.model, ["word_bias"] if parent and is_huggingface(Path(parent)) else [])
            check_parent(recipe)
        if "train" not in wanted and "eval" in wanted and recipe.eval.checkpoint is None and not run.is_trained:
            raise UserError(
                f"{folder} is trained to step {run.step} of {total_steps(recipe.phases)}; finish it with `multihop "
                "train`, or set eval.checkpoint to a Hugging Face model"
            )
        if not any(_is_left(run, stage) for stage in wanted):
            console.print(f"{folder}: nothing left to do")
            _print_report_path(run)
            return DONE
        if "train" in wanted or "eval" in wanted:
            check_access(tracking_uri)
        seconds = _Seconds(read_summary(folder).get("stages", {}))
        ranks = recipe.cluster.worker_range[0] if "train" in wanted else 1
        with ray_session(recipe.cluster.address, ranks):
            return _run_missing_stages(run, wanted, allowed, full_verify, seconds)


def _is_left(run: ResolvedRun, stage: str) -> bool:
    if stage == "prep":
        return run.data is None
    if stage == "train":
        return not run.is_trained or bool(audits_due(run.folder, run.recipe))
    finished = read_summary(run.folder).get("status") == "done"  # the report of a follower is not the last one
    reports = [run.folder / name for name in ("report.html", "report.md")]
    if not (finished and all(report.exists() for report in reports)) or is_behind(run.folder):
        return True
    if run.data is None and run.recipe.eval.checkpoint is None:
        return True
    return not is_evaluation_done(run)


def _run_missing_stages(
    run: ResolvedRun, wanted: Sequence[str], allowed: Sequence[str], full_verify: bool, seconds: _Seconds
) -> int:
    if "train" in wanted or run.recipe.eval.checkpoint is None:
        run = replace(run, data=_prepare(run, allowed, full_verify, seconds))
        raise_if_interrupted()
    if "train" not in wanted and "eval" not in wanted:
        return DONE
    tracker = _open_tracker(run)
    status, failed, is_stopped = "failed", 0, False
    try:
        with background_audits(run) if "train" in wanted else nullcontext() as finish_audits:
            if "train" in wanted and not run.is_trained:
                is_stopped = _train(run, tracker, full_verify, seconds)
                run = with_newest_checkpoint(run)
            if "train" in wanted and not run.is_trained:
                status = "stopped"
                console.print("stopped; rerun the same command to resume from the newest checkpoint")
                return STOPPED
            if is_stopped:
                status = "trained"
                console.print("stopped after the last step; rerun the same command to finish the rest")
                return STOPPED
            raise_if_interrupted()
            if "eval" in wanted:
                failed = _evaluate(run, tracker, seconds)
            if finish_audits:
                finish_audits()
        status = "done" if "eval" in wanted else "trained"
    except KeyboardInterrupt:
        status = "stopped"
        raise
    finally:
        try:
            write_summary(run.folder, status, seconds.by_stage)
            if status == "done":
                _report(run, tracker)
        finally:
            tracker.close(status)
    return DONE if not failed else FAILED


def _check_tokenizer_of_parent(recipe: Recipe) -> None:
    """Refuse a tokenizer that is not that of the Hugging Face model from which training starts.

    That of a checkpoint is recorded in its manifest, and compared when it is loaded.

    Raises:
        UserError: It is another, or one is to be trained.
    """
    source, tokenizer = recipe.model.init_from, recipe.tokenizer
    if source is None or not is_huggingface(Path(source)) or FAMILIES[recipe.model.family].translates:
        return  # the ids of a Marian model are in another file than its tokenizer
    if tokenizer.path is None:
        raise UserError(
            f"model.init_from={source} was trained with its own tokenizer, and this recipe trains one; set "
            "tokenizer.path to a file of its tokenizer"
        )
    check_same_tokenizer(tokenizer.path, tokenizer.lowercase, Path(source))


def _prepare(run: ResolvedRun, allowed: Sequence[str], full_verify: bool, seconds: _Seconds) -> Manifest:
    """Return the data set of the run, verified, prepared or repaired; a link to it is put into the run's folder."""
    recipe = run.recipe
    if recipe.tokenizer.path is not None:
        tokenizer, objective = recipe.tokenizer, recipe.objective
        check_objective(recipe.tokenizer.path, tokenizer.lowercase, objective.name, objective.needs.special_tokens)
    if run.checkpoint is None:
        _check_tokenizer_of_parent(recipe)
    if run.data is None:
        with seconds.of("prep"), progress_line("prepare  ") as line:
            folder, data = get_or_prepare_dataset(
                recipe.data,
                recipe.tokenizer,
                run.files,
                run.inputs,
                run.store,
                run.data_folder,
                lambda stage, done, total: line.update(done, total, stage),
                full_verify,
                run.remote,
            )
        check_data_unchanged(run, data, allowed)
        link_dataset(run.data_folder, folder)
    else:
        data = run.data
        check_data_unchanged(run, data, allowed)
    train, heldout = data.totals["train"], data.totals["heldout"]
    what = "pairs" if data.pairs else "documents"
    console.print(
        f"data      {train.documents + heldout.documents:,} {what}, {train.tokens:,} training tokens, "
        f"{heldout.tokens:,} held-out tokens, {data.number_set_aside:,} files or lines set aside"
    )
    return data


def _open_tracker(run: ResolvedRun) -> "Tracker":
    tags: dict[str, str] = {}
    if run.data is not None:
        tags |= {"fingerprint.data": run.data.fingerprint, "fingerprint.tokenizer": run.data.tokenizers_sha256}
    tags |= {key: str(value) for key, value in environment().items() if value is not None}
    tracking = run.recipe.tracking
    return open_run(run.folder, run.recipe.model_dump(mode="json"), tracking.uri, tracking.experiment, tags)


def _train(run: ResolvedRun, tracker: "Tracker", full_verify: bool, seconds: _Seconds) -> bool:
    """Train to the last step, or until a signal; the checkpoints show how far it came.

    Returns:
        Whether a signal stopped it.
    """
    from multihop.cluster.ray.train_driver import train_on_ray
    from multihop.data_prep.dataset.shards import open_dataset

    last, heldout, has_diagnosis = total_steps(run.recipe.phases), "starting", False
    data = open_dataset(run.data_folder)
    build_indexes(run.folder / "index", data, run.recipe, full_verify)
    build_word_vectors(run.folder / "index", data, run.recipe.model, full_verify)
    plan_training(run)
    write_summary(run.folder, "running", seconds.by_stage)
    with seconds.of("train"), tracker.follow_metrics(), progress_line("pretrain ") as line:

        def show(row: dict[str, Any]) -> None:
            nonlocal heldout, has_diagnosis
            if "heldout_loss" in row:
                heldout = f"held-out {row['heldout_loss']:.3f}"
                if not has_diagnosis and (sentence := diagnosis(read_rows(run.folder / "metrics.jsonl"))):
                    console.print(sentence)
                    has_diagnosis = True
            if "loss" in row:
                speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {row['mfu']:.0%}"
                line.update(row["step"], last, f"loss {row['loss']:.3f}  {heldout}  {speed}")

        line.update(run.step, last, heldout)
        environment, cluster = {MLFLOW_RUN_ID: tracker.run_id}, run.recipe.cluster
        spec = run.remote_spec()
        if run.remote:
            run.remote.upload_indexes()
        workers = cluster.worker_range
        return train_on_ray(run.folder, run.checkpoints, last, workers, environment, cluster.env, show, spec)


def _evaluate(run: ResolvedRun, tracker: "Tracker", seconds: _Seconds) -> int:
    """Run the missing trials; returns how many of them failed for a reason that may not recur in a rerun."""
    from multihop.cluster.runs.trials import final, make_missing_examples, run_missing_trials

    has_work = bool(run.recipe.eval.tasks or run.recipe.eval.examples)
    if not has_work and not run.results.parent.exists():
        return 0
    with wait_for_lock(run.results.parent):
        tracker.forget_logged()
        tracker.log_trials(final(read_rows(run.results)))
        examples = select_examples(run)
        with seconds.of("eval"):
            make_missing_examples(run)
            return run_missing_trials(
                list_trials(run),
                run.recipe.eval,
                run.results,
                lambda row: tracker.log_trials(final([row])),
                remote=run.remote_spec() if run.recipe.eval.checkpoint is None else None,
                examples=examples.key if examples else None,
            )


def _report(run: ResolvedRun, tracker: "Tracker") -> None:
    from multihop.cluster.runs.trials import print_examples
    from multihop.eval.report import FILES_OF_A_RUN
    from multihop.eval.report.run_report import write_report
    from multihop.eval.statistics.choose import median_scores

    write_report(run.folder)
    results = read_results(run.folder)
    tracker.log_scores(median_scores((*results.earlier, *results.rows)))
    tracker.tag_planned_trials([row["key"] for row in (*results.rows, *results.earlier)])
    tracker.log_artifacts([run.folder / name for name in FILES_OF_A_RUN])
    if run.recipe.eval.examples:
        print_examples(run)
    _print_report_path(run)


def _print_report_path(run: ResolvedRun) -> None:
    if (run.folder / "report.html").exists():
        console.print(f"report    {run.folder / 'report.html'} and report.md beside it")
        console.print("compare   multihop ui   shows this run and its trials in MLflow")
