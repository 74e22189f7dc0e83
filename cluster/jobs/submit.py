"""Submit a run to a cluster: the same again attaches to the job that runs, or resumes the run."""

import json
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from multihop.cluster.jobs.archive import code_to_send, untracked, untracked_line, write_archive
from multihop.cluster.jobs.head_script import run_head_script
from multihop.cluster.jobs.head_scripts.inspect_head import MARK, code_hash
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
from multihop.cluster.runs.code_version import COMMIT as COMMIT_HERE
from multihop.cluster.runs.code_version import CodeVersion, code_version
from multihop.cluster.runs.recipe import Recipe, validate_recipe
from multihop.common.errors import UserError
from multihop.common.files import sha256_json
from multihop.pretrain.run.changes import check_allowed, differences, listed, locked_changes

COMMANDS = {"prep": "prep", "train": "train", "eval": "eval", None: "run"}
"""The command for each stage."""
_RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class JobRequest:
    """What is to be run where."""

    recipe: Recipe
    stage: str | None
    """None: all."""
    runs: str
    """The folder of all runs, on the cluster."""
    allowed: Sequence[str]
    """Keys that may change in a run that stands."""

    @property
    def content(self) -> str:
        """Hash of the order, 10 hexadecimal digits, without the cluster's address and the keys that may change."""
        described = _comparable(self.recipe.model_dump(mode="json"))
        return sha256_json({"recipe": described, "stage": self.stage, "runs": self.runs})[:10]

    def command(self, job_id: str) -> str:
        """The shell command of the job."""
        options = ["--runs", self.runs, *(part for key in self.allowed for part in ("--allow-change", key))]
        variables = [f"{JOB}={job_id}", f"{COMMIT_HERE}={code_version().label or ''}"]
        return "exec " + shlex.join(
            ["env", *variables, "python", "-m", "multihop.cluster.cli.main", COMMANDS[self.stage], _RECIPE, *options]
        )


@dataclass(frozen=True)
class Found:
    """What the head says of itself."""

    code: str | None
    """Hash of the installed code; None: not installed."""
    versions: dict[str, str | None]
    recipe: dict[str, Any] | None
    """Of the run that stands under this name."""


def submit(jobs: Jobs, order: JobRequest, say: Callable[[str], object]) -> Job:
    """Submit, or find the job that does this already.

    Args:
        say: prints a line.

    Raises:
        UserError: another recipe runs or stands under this name, or the code is too large to send.
    """
    name = order.recipe.name
    earlier = [job for job in jobs.all() if job.run == name]
    if running := next((job for job in earlier if not job.has_ended), None):
        return _attached(running, order, say)
    found = look(jobs, f"{order.runs}/{name}")
    if found.versions["ray"] is None:
        raise UserError(
            f"`python` on the cluster's head is a Python {found.versions['python']} without Ray; start Ray there from "
            "the environment that has this project's packages"
        )
    here = code_version()
    is_same = found.code is not None and found.code == code_hash(here.package)
    say(f"run       {name}, {order.runs}/{name} on the cluster: {order.stage or 'all stages'}")
    for line in _changes(order, found.recipe):
        say(f"recipe    {line}")
    least, most = order.recipe.cluster.least_and_most
    say(f"ranks     {least if least == most else f'{least} to {most}'}")
    code = {} if is_same else code_to_send(here)
    contents = {_RECIPE: yaml.safe_dump(_for_cluster(order.recipe), sort_keys=False).encode()}
    metadata = {
        DASHBOARD_NAME: name,
        RUN: name,
        RUNS: order.runs,
        CONTENT: order.content,
        CODE: code_hash(here.package) or "",
        COMMIT: here.label or "",
        RECIPE: json.dumps(order.recipe.model_dump(mode="json")),
    }
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "job.zip"
        size = write_archive(archive, contents, code, LARGEST_ARCHIVE)
        say(f"code      {_code_line(here, is_same, found.code)}")
        say(f"sends     {size}")
        if code and (new := untracked(here)):
            say(f"untracked {untracked_line(new)}")
        number = 1 + max((_number(job, name) for job in earlier), default=0)
        while True:
            job_id = f"{name}-{number}"  # no hash in it: of two concurrent orders for a run, the head accepts one
            if jobs.submit(job_id, order.command(job_id), archive, metadata):
                break
            other = jobs.get(job_id)
            if other is not None and not other.has_ended:
                return _attached(other, order, say)
            number += 1
    job = jobs.get(job_id)
    assert job is not None, job_id
    say(f"job       {job_id}")
    return job


def look(jobs: Jobs, run_dir: str) -> Found:
    """Ask the head for its code, its packages and the recipe of a run."""
    printed = run_head_script(jobs, "inspect_head", [run_dir])
    found = json.loads(next(line for line in printed.splitlines() if line.startswith(MARK)).removeprefix(MARK))
    recipe = None if found["recipe"] is None else json.loads(found["recipe"])
    return Found(found["code"], found["versions"], recipe)


def _attached(job: Job, order: JobRequest, say: Callable[[str], object]) -> Job:
    now = order.recipe.model_dump(mode="json")
    if job.metadata.get(CONTENT) != order.content:
        changed = differences(_comparable(job.recipe), _comparable(now))
        what = listed(changed) if changed else "another stage or folder of runs"
        raise UserError(
            f"the job {job.id} runs {job.run} with another recipe ({what}); set name=… for a new run, or stop it first "
            f"with `multihop stop {job.run}`"
        )
    if job.metadata.get(CODE) != code_hash(code_version().package):
        say(f"code      the job runs {job.metadata.get(COMMIT) or 'no commit'}, which differs from yours")
    say(f"job       {job.id} does this already; following it")
    return job


def _changes(order: JobRequest, standing: dict[str, Any] | None) -> list[str]:
    """The differences from the run that stands, as lines; raises UserError for those that are not allowed."""
    if standing is None:
        return ["a new run"]
    where = f"{order.runs}/{order.recipe.name}"
    then = validate_recipe(standing, f"{where}/recipe.json").model_dump(mode="json")
    now = order.recipe.model_dump(mode="json")
    check_allowed(locked_changes(then, now, Recipe), Recipe, order.allowed, where)
    changed = differences(_comparable(then), _comparable(now))
    return [listed([entry]) for entry in changed] or ["the same as that of the run that stands"]


def _comparable(recipe: dict[str, Any]) -> dict[str, Any]:
    return {**recipe, "cluster": {key: value for key, value in recipe.get("cluster", {}).items() if key != "address"}}


def _for_cluster(recipe: Recipe) -> dict[str, Any]:
    described = recipe.model_dump(mode="json")
    described["cluster"]["address"] = None  # the job is on it
    return described


def _number(job: Job, name: str) -> int:
    last = job.id.removeprefix(f"{name}-").rpartition("-")[2]
    return int(last) if last.isdigit() else 0


def _code_line(here: CodeVersion, is_same: bool, theirs: str | None) -> str:
    label = here.label or "no commit"
    if is_same:
        return f"{label}, which the cluster has installed"
    return f"{label}, sent: the cluster has {'none' if theirs is None else 'another one'}"
