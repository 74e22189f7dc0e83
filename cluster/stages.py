"""The stages of a run: prepare, pretrain, evaluate, report. What is done already is not done again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.mlflow_store import store_uri
from cluster.prep import link, provide, work_of
from cluster.progress import console, progress_line
from cluster.recipe import Recipe
from cluster.run_folder import note_change, opened
from cluster.session import check_answers, ray_session
from cluster.summary import environment, read_summary, write_summary
from cluster.tracking import is_behind, open_run
from data_prep.identity import sources_key
from data_prep.manifest import Manifest
from data_prep.pipeline import already_prepared
from data_prep.reading.sources import list_files
from data_prep.rows import read_rows
from data_prep.tokenizers.existing import check_objective
from eval.tasks import check_tasks
from pretrain.checkpoint import CheckpointManifest, folder_of_step, newest_step, read_manifest, verify
from pretrain.order import total_steps
from pretrain.run_files import checkpoints_of
from pretrain.samples import build_indexes
from pretrain.starting import MLFLOW_RUN_ID, STOPPED

if TYPE_CHECKING:
    from cluster.tracking import Tracker
    from eval.trial import Trial

DONE = 0
STAGES = ("prep", "train", "eval")


@dataclass
class _Run:
    recipe: Recipe
    folder: Path
    store: Path
    """The data sets of the recipe's sources, shared by all runs."""
    allowed: Sequence[str]
    """Keys whose changes are wanted under a run that has begun."""
    seconds: dict[str, float] = field(default_factory=dict)
    verified: str | None = None
    """The hash of the last checkpoint's manifest, once all of its files were read."""
    damage: str | None = None
    """What is wrong with the last checkpoint, once the user was told."""

    @property
    def checkpoints(self) -> str:
        return checkpoints_of(self.folder, self.recipe)

    @property
    def results(self) -> Path:
        return self.folder / "eval" / "results.jsonl"

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started


def run_stages(recipe: Recipe, runs: Path, last: str = "eval", allowed: Sequence[str] = ()) -> int:
    """Do what is not done of the stages up to `last`; the exit code.

    Args:
        allowed: dotted keys whose changes are wanted under a run that has begun.

    Raises:
        ValueError: a mistake of the user's, found before anything was started where it can be.
    """
    check_tasks(recipe.eval, recipe.model.family)
    list_files(recipe.data.sources)
    store_uri(runs, recipe.tracking.uri)
    check_answers(recipe.cluster.address)
    wanted = STAGES[: STAGES.index(last) + 1]
    run = _Run(recipe, runs / recipe.name, runs / ".prepared" / sources_key(recipe.data), allowed)
    with opened(run.folder, recipe, allowed):
        run.seconds = dict(read_summary(run.folder).get("stages", {}))
        if not any(_is_left(run, stage) for stage in wanted):
            console.print(f"{run.folder}: nothing left to do")
            _tell_where(run)
            return DONE
        ranks = recipe.cluster.workers if "train" in wanted else 1
        with ray_session(recipe.cluster.address, ranks):
            return _do(run, wanted)


def _is_left(run: _Run, stage: str) -> bool:
    if stage == "prep":
        return _standing_data(run) is None
    if stage == "train":
        return not _is_trained(run)
    if not (run.folder / "report.html").exists() or is_behind(run.folder):
        return True
    manifest = _standing_data(run)
    return manifest is None or bool(_trials_left(run, manifest))


def _do(run: _Run, wanted: tuple[str, ...]) -> int:
    manifest = _prepare(run)
    if wanted == ("prep",):
        return DONE
    recipe = run.recipe.model_dump(mode="json")
    tags = {"fingerprint.data": manifest.fingerprint, "fingerprint.tokenizer": manifest.tokenizer.sha256}
    tags |= {key: str(value) for key, value in environment().items() if value is not None}
    tracker = open_run(run.folder, recipe, run.recipe.tracking.uri, run.recipe.tracking.experiment, tags)
    status = "failed"
    try:
        finished = _train(run, manifest, tracker)
        if not finished:
            status = "stopped"
            console.print("stopped; the same command goes on from the newest checkpoint")
            return STOPPED
        if "eval" in wanted:
            _evaluate(run, manifest, tracker)
            status = "done"
        else:
            status = "trained"
    except KeyboardInterrupt:
        status = "stopped"
        raise
    finally:
        try:
            write_summary(run.folder, status, run.seconds)
            if status == "done":
                _report(run, tracker)
        finally:
            tracker.close(status)
    return DONE


def _standing_data(run: _Run) -> Manifest | None:
    if not (run.folder / "data").exists():
        return None
    return already_prepared(run.recipe.data, run.recipe.tokenizer, run.folder / "data", work_of(run.store))


def _prepare(run: _Run) -> Manifest:
    """The prepared data, shared by all runs with the same sources and settings, and linked to from this one.

    What stands there is hashed once more at each start, and what is damaged is rebuilt.
    """
    if run.recipe.tokenizer.path is not None:
        check_objective(run.recipe.tokenizer.path, run.recipe.tokenizer.lowercase, run.recipe.objective.name)
    place = run.folder / "data"
    with run.timed("prep" if _standing_data(run) is None else "verify"), progress_line("prepare  ") as line:
        folder, manifest = provide(
            run.recipe.data,
            run.recipe.tokenizer,
            run.store,
            place,
            lambda stage, done, total: line.update(done, total, stage),
        )
    _check_unchanged(run, manifest)
    link(place, folder)
    train, heldout = manifest.totals["train"], manifest.totals["heldout"]
    console.print(
        f"data      {train.documents + heldout.documents:,} documents, {train.tokens:,} pieces to train on, "
        f"{heldout.tokens:,} held out, {len(manifest.set_aside)} files or lines set aside"
    )
    return manifest


def _check_unchanged(run: _Run, manifest: Manifest) -> None:
    step = newest_step(run.checkpoints)
    if step is None:
        return
    saved = read_manifest(folder_of_step(run.checkpoints, step))
    if saved.data_fingerprint == manifest.fingerprint:
        return
    if saved.tokenizer_sha256 not in (None, manifest.tokenizer.sha256):
        raise ValueError(
            f"the texts changed under {run.folder}, and with them the tokenizer that is trained on them: the model "
            "would read other pieces than it knows; bring the old texts back, or set name=… for another run"
        )
    if "data" in run.allowed:
        note_change(run.folder, "data", [("data", saved.data_fingerprint, manifest.fingerprint)])
        return
    raise ValueError(
        f"the texts changed under {run.folder}: it was trained on data {saved.data_fingerprint[:12]}, and "
        f"data.sources now give {manifest.fingerprint[:12]}; bring the old texts back, set name=…, or, to go on with "
        "the new ones, add --allow-change data"
    )


def _train(run: _Run, manifest: Manifest, tracker: "Tracker") -> bool:
    """Whether the last step is done."""
    last = total_steps(run.recipe.phases)
    if _is_trained(run):
        return True
    from cluster.train import train_on_ray
    from data_prep.shards import open_dataset

    build_indexes(run.folder / "index", open_dataset(run.folder / "data"), run.recipe)
    write_summary(run.folder, "running", run.seconds)
    heldout = "starting"
    with run.timed("train"), tracker.follow_metrics(), progress_line("pretrain ") as line:

        def show(row: dict[str, Any]) -> None:
            nonlocal heldout
            if "heldout_loss" in row:
                heldout = f"held-out {row['heldout_loss']:.3f}"
            if "loss" in row:
                speed = f"{row['tokens_per_s']:,.0f} tokens/s  MFU {row['mfu']:.0%}"
                line.update(row["step"], last, f"loss {row['token_loss']:.3f}  {heldout}  {speed}")

        line.update(newest_step(run.checkpoints) or 0, last, heldout)
        train_on_ray(run.folder, run.checkpoints, run.recipe.cluster.workers, {MLFLOW_RUN_ID: tracker.run_id}, show)
    return _is_trained(run)


def _is_trained(run: _Run) -> bool:
    """Whether the last step's checkpoint is there and as it was written; where it is damaged, says so."""
    if newest_step(run.checkpoints) != total_steps(run.recipe.phases):
        return False
    try:
        _last_checkpoint(run)
    except ValueError as error:
        if str(error) != run.damage:
            console.print(f"{error}; the steps since the last good checkpoint are trained again")
            run.damage = str(error)
        return False
    return True


def _last_checkpoint(run: _Run) -> CheckpointManifest:
    """The manifest of the last step's checkpoint, all of whose files are read, once in a start.

    Raises:
        ValueError: it is missing or damaged.
    """
    location = folder_of_step(run.checkpoints, total_steps(run.recipe.phases))
    manifest = read_manifest(location)
    if manifest.sha256 != run.verified:
        manifest = verify(location)
        run.verified = manifest.sha256
    return manifest


def _plan(run: _Run, manifest: Manifest) -> "list[Trial]":
    from eval.trial import plan_trials

    saved = _last_checkpoint(run)
    checkpoint = folder_of_step(run.checkpoints, saved.step)
    data = (run.folder / "data").absolute()
    return plan_trials(
        run.recipe.eval, run.recipe.model, checkpoint, saved.content_hash(), saved.step, data, manifest.fingerprint
    )


def _trials_left(run: _Run, manifest: Manifest) -> "list[Trial]":
    from cluster.fanout import trials_left

    return trials_left(_plan(run, manifest), run.results)


def _evaluate(run: _Run, manifest: Manifest, tracker: "Tracker") -> None:
    from cluster.fanout import run_trials

    left = _trials_left(run, manifest)
    tracker.log_trials(read_rows(run.results))
    if not left:
        return
    done = 0
    with run.timed("eval"), progress_line("fine-tune") as line:
        line.update(0, len(left))

        def show(row: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            tracker.log_trials([row])
            value = f"{row['metric']} {row['value']:.3f}" if row["status"] == "ok" else "failed"
            line.update(done, len(left), f"{row['task']} {row['init']} seed {row['seed']}: {value}")

        run_trials(left, run.results, show)


def _report(run: _Run, tracker: "Tracker") -> None:
    from eval.report import write_report

    write_report(run.folder)
    names = ("report.html", "report.md", "loss.png", "recipe.json", "summary.json")
    tracker.log_artifacts([run.folder / name for name in names])
    _tell_where(run)


def _tell_where(run: _Run) -> None:
    if (run.folder / "report.html").exists():
        console.print(f"report    {run.folder / 'report.html'} and report.md beside it")
        console.print("compare   multihop ui   shows this run and its trials in MLflow")
