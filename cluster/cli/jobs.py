"""The commands `submit`, `jobs`, `attach`, `logs`, `stop` and `fetch`: runs on a cluster, from another machine."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multihop.cluster.cli.doctor import passes_checks
from multihop.cluster.cli.options import Allow, Dashboard, JobName, Overrides, RecipePath
from multihop.common.errors import DETACHED, FAILED
from multihop.common.redaction import safe_text

if TYPE_CHECKING:
    from multihop.cluster.jobs.submit import JobRequest
    from multihop.cluster.ray.jobs import Job, Jobs

job_commands = typer.Typer()
_LOCAL = "http://127.0.0.1:8265"


@job_commands.command()
def submit(
    recipe: RecipePath,
    runs: Annotated[
        str, typer.Option(help="Directory of all runs, at the same path on all nodes, or s3://BUCKET/PREFIX.")
    ],
    overrides: Overrides = None,
    address: Dashboard = _LOCAL,
    stage: Annotated[Literal["prep", "train", "eval"] | None, typer.Option(help="Default: all stages.")] = None,
    allow_change: Allow = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the cluster first, and submit nothing if there are problems.")
    ] = False,
) -> None:
    """Run a recipe on a Ray cluster and follow its output. Rerun it to attach to the job, or to resume the run."""
    from multihop.cluster.jobs.submit import JobRequest, load_for_cluster

    loaded = load_for_cluster(recipe, overrides or [], runs)
    request = JobRequest(loaded, stage, runs.rstrip("/"), allow_change or ())
    if check and not passes_checks(address, request.recipe, request.runs):
        raise typer.Exit(FAILED)
    raise typer.Exit(submit_and_follow(address, request))


@job_commands.command()
def jobs(address: Dashboard = _LOCAL) -> None:
    """List the jobs of a cluster."""
    show_jobs(address)


@job_commands.command()
def attach(name: JobName, address: Dashboard = _LOCAL) -> None:
    """Follow the job of a run from its first line."""
    raise typer.Exit(attach_to(address, name))


@job_commands.command()
def logs(
    name: JobName,
    address: Dashboard = _LOCAL,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow it until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="The log of this rank.")] = None,
) -> None:
    """Print the output of a run's job."""
    raise typer.Exit(show_log(address, name, follow, rank))


@job_commands.command()
def stop(
    name: JobName,
    address: Dashboard = _LOCAL,
    now: Annotated[bool, typer.Option("--now", help="Kill it without saving a checkpoint.")] = False,
) -> None:
    """Stop a run after it saves a checkpoint."""
    raise typer.Exit(stop_job(address, name, now))


@job_commands.command()
def fetch(
    name: JobName,
    address: Dashboard = _LOCAL,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write NAME/ to.")] = Path("fetched"),
) -> None:
    """Copy a run's report and results to this machine."""
    show_fetch(address, name, out)


def submit_and_follow(address: str, request: "JobRequest") -> int:
    """Submit a request, follow its job, and return the run's exit code."""
    from multihop.cluster.jobs.head_script import HeadScriptFailed
    from multihop.cluster.jobs.submit import submit
    from multihop.cluster.ray.jobs import Jobs

    jobs = Jobs(address)
    try:
        job = submit(jobs, request, lambda line: print(safe_text(line), flush=True))
    except HeadScriptFailed as error:
        print(f"multihop: {safe_text(str(error))}", file=sys.stderr)
        return FAILED
    return _follow_job(jobs, job)


def attach_to(address: str, name: str) -> int:
    """Follow a run's job from its first line; returns the run's exit code."""
    from multihop.cluster.jobs.results import find_job
    from multihop.cluster.ray.jobs import Jobs

    jobs = Jobs(address)
    return _follow_job(jobs, find_job(jobs, name))


def show_jobs(address: str) -> None:
    """Print a table of all jobs, the newest first."""
    from rich.console import Console
    from rich.table import Table

    from multihop.cluster.console import plain
    from multihop.cluster.ray.jobs import COMMIT, Jobs

    table = Table("run", "job", "status", "started", "took", "commit", header_style="bold", box=None)
    for job in reversed(Jobs(address).all()):
        code = "" if job.exit_code in (None, 0) else f", exit code {job.exit_code}"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started)) if job.started else ""
        cells = (job.run, job.id, job.status.lower() + code, started, _duration(job), job.metadata.get(COMMIT, ""))
        table.add_row(*map(plain, cells))
    Console().print(table)


def show_log(address: str, name: str, following: bool, rank: int | None) -> int:
    """Print what a run's job printed, or the log of one of its ranks."""
    from multihop.cluster.jobs.head_script import HeadScriptFailed
    from multihop.cluster.jobs.results import find_job, follow_rank_log
    from multihop.cluster.ray.jobs import Jobs

    jobs = Jobs(address)
    job = find_job(jobs, name)
    if rank is not None:
        try:
            follow_rank_log(jobs, job, rank, following, _write)
        except HeadScriptFailed as error:
            print(f"multihop: {safe_text(str(error))}", file=sys.stderr)
            return FAILED
        return 0
    if following:
        return _follow_job(jobs, job)
    _write(jobs.output(job.id))
    return 0


def stop_job(address: str, name: str, now: bool) -> int:
    """Stop a run's job and wait for its end: it saves a checkpoint first, unless `now`."""
    from multihop.cluster.jobs.follow import exit_code, follow_job, outcome
    from multihop.cluster.jobs.head_script import run_head_script
    from multihop.cluster.jobs.results import find_job
    from multihop.cluster.ray.jobs import JOB, Jobs

    jobs = Jobs(address)
    job = find_job(jobs, name)
    if job.has_ended:
        print(f"{name} has ended: {job.status.lower()}")
        return 0
    if now:
        print(run_head_script(jobs, "kill", [JOB, job.id]).strip())
    jobs.stop(job.id)
    ended = follow_job(jobs, job.id, lambda chunk: None)
    print(outcome(ended, name))
    return 0 if ended is not None else exit_code(None)


def show_fetch(address: str, name: str, out: Path) -> None:
    """Copy the results of a run to `out / name`, and print how many files were written.

    Raises:
        UserError: the run has no results, or a directory or other file blocks their path.
    """
    from multihop.cluster.jobs.results import fetch_results, find_job
    from multihop.cluster.ray.jobs import Jobs

    jobs = Jobs(address)
    written = fetch_results(jobs, find_job(jobs, name), out / name)
    print(f"wrote {written} files to {safe_text(str(out / name))}")


def _follow_job(jobs: "Jobs", job: "Job") -> int:
    from multihop.cluster.jobs.follow import exit_code, follow_job, outcome

    name = job.run

    def ask() -> None:
        if not _wants_to_stop(name):
            raise KeyboardInterrupt
        jobs.stop(job.id)

    try:
        ended = follow_job(jobs, job.id, _write, ask)
    except KeyboardInterrupt:
        print(f"\nthe job keeps running; `multihop attach {name}` follows it again", file=sys.stderr)
        return DETACHED
    print(outcome(ended, name), file=sys.stderr)
    return exit_code(ended)


def _wants_to_stop(name: str) -> bool:
    """Ask the user; without a terminal, or with a second Ctrl-C, the job is left running."""
    if not sys.stdin.isatty():
        return False
    try:
        print(f"\nStop {name}? It saves a checkpoint first. [y: stop, Enter: leave it running]", file=sys.stderr)
        return input().strip().lower() in ("y", "yes", "stop")
    except (KeyboardInterrupt, EOFError):
        return False


def _write(text: str) -> None:
    sys.stdout.write(safe_text(text))
    sys.stdout.flush()


def _duration(job: "Job") -> str:
    if job.started is None:
        return ""
    minutes, seconds = divmod(round((job.ended or time.time()) - job.started), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
