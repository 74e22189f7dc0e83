"""Submits a run to a cluster. Submitting it again attaches to the job that runs, or resumes the run.

The paths in a recipe that is sent to a cluster are paths on its nodes, and must be absolute.
"""

import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from multihop.cluster.jobs.archive import code_to_send, format_untracked, untracked_files, write_archive
from multihop.cluster.jobs.head_script import result_of, run_head_script
from multihop.cluster.jobs.head_scripts.inspect_head import RESULT_PREFIX, code_hash
from multihop.cluster.ray.jobs import (
    CODE,
    COMMIT,
    CONTENT,
    DASHBOARD_NAME,
    JOB,
    LARGEST_ARCHIVE,
    RECIPE,
    RUN,
    RUNS,
    Job,
    Jobs,
)
from multihop.cluster.remote.remote_run import with_remote_checkpoints
from multihop.cluster.runs.code_version import COMMIT as COMMIT_VARIABLE
from multihop.cluster.runs.code_version import CodeVersion, code_version
from multihop.cluster.runs.recipe import Recipe, read_recipe, resolve_paths, validate_recipe
from multihop.common.errors import UserError
from multihop.common.files import sha256_json
from multihop.pretrain.run.changes import check_allowed, differences, format_diff, locked_changes

COMMANDS = {"prep": "prep", "train": "train", "eval": "eval", None: "run"}
"""The command for each stage."""
_RECIPE = "recipe.yaml"
_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class JobRequest:
    """A recipe, and how the cluster should run it."""

    recipe: Recipe
    stage: str | None
    """prep, train or eval; None: all stages."""
    runs: str
    """Folder of all runs on the cluster, or s3://BUCKET/PREFIX."""
    allowed: Sequence[str]
    """Keys that may change in an existing run."""

    @property
    def content(self) -> str:
        """Hash of the request, 10 hexadecimal digits, without the cluster's address and the keys that may change."""
        described = _comparable(self.recipe.model_dump(mode="json"))
        return sha256_json({"recipe": described, "stage": self.stage, "runs": self.runs})[:10]

    def command(self, job_id: str) -> str:
        """Return the shell command of the job."""
        options = ["--runs", self.runs, *(part for key in self.allowed for part in ("--allow-change", key))]
        variables = [f"{JOB}={job_id}", f"{COMMIT_VARIABLE}={code_version().label or ''}"]
        return "exec " + shlex.join(
            ["env", *variables, "python", "-m", "multihop.cluster.cli.main", COMMANDS[self.stage], _RECIPE, *options]
        )


@dataclass(frozen=True)
class HeadReport:
    """The packages that a cluster's head has installed, and the recipe of a run."""

    code: str | None
    """Hash of the installed code; None: not installed."""
    versions: dict[str, str | None]
    recipe: dict[str, Any] | None
    """Recipe of the run of this name; None: there is no such run yet."""


def load_for_cluster(path: Path, overrides: list[str], runs: str | None) -> Recipe:
    """Load a recipe as `load_recipe` does, for a run on a cluster.

    Args:
        runs: directory of all runs on the nodes, or s3://BUCKET/PREFIX; None if unknown.

    Raises:
        UserError: a path is relative, or as for `load_recipe`.
    """
    recipe = read_recipe(path, overrides)
    for key, value in (*_paths(recipe), ("--runs", runs)):
        if value is not None and not value.startswith(("/", "package:")) and "://" not in value:
            raise UserError(f"{key}={value} is relative; give the absolute path that all nodes of the cluster see")
    uri = recipe.tracking.uri
    if uri is not None and uri.startswith(_SQLITE) and not uri.startswith(f"{_SQLITE}/"):
        raise UserError(
            f"tracking.uri={uri} is relative; write {_SQLITE} and the absolute path on the cluster's head, or omit it "
            "for SQLite in the directory of the runs"
        )
    return resolve_paths(recipe if runs is None else with_remote_checkpoints(recipe, runs))


def submit(jobs: Jobs, request: JobRequest, echo: Callable[[str], object]) -> Job:
    """Submit a run, or attach to the job that already runs it.

    Args:
        echo: called with each line to print.

    Raises:
        UserError: a job or a run of this name has another recipe, or the code is too large to send.
    """
    name = request.recipe.name
    earlier = [job for job in jobs.all() if job.run == name]
    if running := next((job for job in earlier if not job.has_ended), None):
        return _attach(running, request, echo)
    head = inspect_head(jobs, f"{request.runs}/{name}")
    if head.versions["ray"] is None:
        raise UserError(
            f"`python` on the cluster's head is a Python {head.versions['python']} without Ray; start Ray there from "
            "the environment that has this project's packages"
        )
    local = code_version()
    is_same = head.code is not None and head.code == code_hash(local.package)
    echo(f"run       {name}, {request.runs}/{name} on the cluster: {request.stage or 'all stages'}")
    for line in _changes(request, head.recipe):
        echo(f"recipe    {line}")
    least, most = request.recipe.cluster.worker_range
    echo(f"ranks     {least if least == most else f'{least} to {most}'}")
    code = {} if is_same else code_to_send(local)
    contents = {_RECIPE: yaml.safe_dump(_for_cluster(request.recipe), sort_keys=False).encode()}
    metadata = {
        DASHBOARD_NAME: name,
        RUN: name,
        RUNS: request.runs,
        CONTENT: request.content,
        CODE: code_hash(local.package) or "",
        COMMIT: local.label or "",
        RECIPE: json.dumps(request.recipe.model_dump(mode="json")),
    }
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "job.zip"
        size = write_archive(archive, contents, code, LARGEST_ARCHIVE)
        echo(f"code      {_code_line(local, is_same, head.code)}")
        echo(f"archive   {size}")
        if code and (new := untracked_files(local)):
            echo(f"untracked {format_untracked(new)}")
        number = 1 + max((_number(job, name) for job in earlier), default=0)
        while True:
            job_id = f"{name}-{number}"  # no hash in it: of two concurrent requests for a run, the head accepts one
            if jobs.submit(job_id, request.command(job_id), archive, metadata):
                break
            other = jobs.get(job_id)
            if other is not None and not other.has_ended:
                return _attach(other, request, echo)
            number += 1
    job = jobs.get(job_id)
    assert job is not None, job_id
    echo(f"job       {job_id}")
    return job


def inspect_head(jobs: Jobs, run_dir: str) -> HeadReport:
    """Ask the head for its code, its packages and the recipe of a run."""
    printed = run_head_script(jobs, "inspect", [run_dir])
    report = result_of(printed, RESULT_PREFIX)
    recipe = None if report["recipe"] is None else json.loads(report["recipe"])
    return HeadReport(report["code"], report["versions"], recipe)


def _attach(job: Job, request: JobRequest, echo: Callable[[str], object]) -> Job:
    now = request.recipe.model_dump(mode="json")
    if job.metadata.get(CONTENT) != request.content:
        changed = differences(_comparable(job.recipe), _comparable(now))
        what = format_diff(changed) if changed else "another stage or directory of runs"
        raise UserError(
            f"the job {job.id} runs {job.run} with another recipe ({what}); set name=… for a new run, or stop the job "
            f"first with `multihop stop {job.run}`"
        )
    if job.metadata.get(CODE) != code_hash(code_version().package):
        echo(f"code      the job runs {job.metadata.get(COMMIT) or 'no commit'}, which differs from yours")
    echo(f"job       {job.id} already runs this; following its output")
    return job


def _changes(request: JobRequest, existing: dict[str, Any] | None) -> list[str]:
    """Return the differences from an existing run, one a line; raises UserError for those that are not allowed."""
    if existing is None:
        return ["a new run"]
    run_dir = f"{request.runs}/{request.recipe.name}"
    then = validate_recipe(existing, f"{run_dir}/recipe.json").model_dump(mode="json")
    now = request.recipe.model_dump(mode="json")
    check_allowed(locked_changes(then, now, Recipe), Recipe, request.allowed, run_dir)
    changed = differences(_comparable(then), _comparable(now))
    return [format_diff([entry]) for entry in changed] or ["as in the existing run"]


def _comparable(recipe: dict[str, Any]) -> dict[str, Any]:
    return {**recipe, "cluster": {key: value for key, value in recipe.get("cluster", {}).items() if key != "address"}}


def _for_cluster(recipe: Recipe) -> dict[str, Any]:
    described = recipe.model_dump(mode="json")
    described["cluster"]["address"] = None  # the job is on it
    return described


def _number(job: Job, name: str) -> int:
    last = job.id.removeprefix(f"{name}-").rpartition("-")[2]
    return int(last) if last.isdigit() else 0


def _code_line(local: CodeVersion, is_same: bool, theirs: str | None) -> str:
    label = local.label or "no commit"
    if is_same:
        return f"{label}, which the cluster has installed"
    return f"{label}, sent: the cluster has {'none' if theirs is None else 'another one'}"


def _paths(recipe: Recipe) -> Iterator[tuple[str, str | None]]:
    """Yield the keys and values that are paths on the nodes. `engine.deepspeed` is not among them: its content is
    sent."""
    for number, source in enumerate(recipe.data.sources):
        yield f"data.sources[{number}].path", source.path
        yield f"data.sources[{number}].target_path", source.target_path
    for number, path in enumerate(recipe.data.decontaminate.against if recipe.data.decontaminate else ()):
        yield f"data.decontaminate.against[{number}]", path
    yield "data.filters.c4.bad_words", recipe.data.filters.c4.bad_words if recipe.data.filters.c4 else None
    yield "tokenizer.path", recipe.tokenizer.path
    yield "model.init_from", recipe.model.init_from
    yield "checkpoint.location", recipe.checkpoint.location
    yield "eval.data_dir", recipe.eval.data_dir
    yield "eval.checkpoint", recipe.eval.checkpoint
    yield "eval.average_with", recipe.eval.average_with
    for number, task in enumerate(recipe.eval.tasks):
        if task.name.endswith((".yaml", ".yml")):
            yield f"eval.tasks[{number}]", task.name
