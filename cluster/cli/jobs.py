"""The commands about jobs of a cluster."""

import base64
import sys
import time
from pathlib import Path

from multihop.cluster.jobs.fetched import unpack_results
from multihop.cluster.jobs.follow import exit_code, follow, verdict
from multihop.cluster.jobs.head_script import HeadScriptFailed, run_head_script
from multihop.cluster.jobs.head_scripts.pack_results import MARK
from multihop.cluster.jobs.head_scripts.print_log import OFFSET_PREFIX
from multihop.cluster.jobs.submit import JobRequest, submit
from multihop.cluster.ray.jobs import COMMIT, JOB, RUNS, Job, Jobs
from multihop.common.errors import DETACHED, FAILED, UserError
from multihop.common.redaction import shown

_FOLLOW_TIMEOUT_S = 600
"""Seconds for which one job on the head follows a log before this process starts the next: the head cannot see whether
this process is still alive."""


def submit_and_follow(address: str, order: JobRequest) -> int:
    """Submit an order, follow it, and return the run's exit code."""
    jobs = Jobs(address)
    return _follow(jobs, submit(jobs, order, lambda line: print(shown(line), flush=True)))


def attach_to(address: str, name: str) -> int:
    """Follow a run's job from its first line; returns the run's exit code."""
    jobs = Jobs(address)
    return _follow(jobs, find_job(jobs, name))


def show_jobs(address: str) -> None:
    """Print a table of all jobs, the newest first."""
    from rich.console import Console
    from rich.table import Table

    from multihop.cluster.console import plain

    table = Table("run", "job", "status", "started", "took", "code", header_style="bold", box=None)
    for job in reversed(Jobs(address).all()):
        code = "" if job.exit_code in (None, 0) else f", exit code {job.exit_code}"
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.started)) if job.started else ""
        cells = (job.run, job.id, job.status.lower() + code, started, _duration(job), job.metadata.get(COMMIT, ""))
        table.add_row(*map(plain, cells))
    Console().print(table)


def show_log(address: str, name: str, following: bool, rank: int | None) -> int:
    """Print what a run's job printed, or the log of one of its ranks."""
    jobs = Jobs(address)
    job = find_job(jobs, name)
    if rank is not None:
        try:
            _show_rank(jobs, job, rank, following)
        except HeadScriptFailed as error:
            print(f"multihop: {shown(str(error))}", file=sys.stderr)
            return FAILED
        return 0
    if following:
        return _follow(jobs, job)
    _write(jobs.output(job.id))
    return 0


def _show_rank(jobs: Jobs, job: Job, rank: int, following: bool) -> None:
    """Print a rank's log; if `following`, also what is appended to it until the job ends.

    Raises:
        HeadScriptFailed: There is no such log, or it cannot be read.
    """
    read_to = 0

    def write(line: str) -> None:
        nonlocal read_to
        if line.startswith(OFFSET_PREFIX):
            read_to = int(line.removeprefix(OFFSET_PREFIX))
        else:
            _write(line)

    while True:
        now = jobs.get(job.id) if following else None
        goes_on = now is not None and not now.has_ended
        of_job = [JOB, job.id, str(_FOLLOW_TIMEOUT_S)] if goes_on else []
        run_head_script(jobs, "print_log", [_folder(job), str(rank), str(read_to), *of_job], write)
        if not goes_on:
            return


def stop_job(address: str, name: str, now: bool) -> int:
    """Stop a run's job and wait for its end: it saves a checkpoint first, unless `now`."""
    jobs = Jobs(address)
    job = find_job(jobs, name)
    if job.has_ended:
        print(f"{name} has ended: {job.status.lower()}")
        return 0
    if now:
        print(run_head_script(jobs, "kill", [JOB, job.id]).strip())
    jobs.stop(job.id)
    ended = follow(jobs, job.id, lambda chunk: None)
    print(verdict(ended, name))
    return 0 if ended is not None else exit_code(None)


def fetch_results(address: str, name: str, out: Path) -> None:
    """Copy report, results, metrics and recipe of a run to this machine, replacing those of an earlier fetch.

    Raises:
        UserError: The run has none, or a directory or other file blocks their path.
    """
    jobs = Jobs(address)
    job = find_job(jobs, name)
    try:
        printed = run_head_script(jobs, "pack_results", [_folder(job)])
    except HeadScriptFailed as error:
        raise UserError(str(error)) from None
    lines = [line.removeprefix(MARK) for line in printed.splitlines() if line.startswith(MARK)]
    fetched = unpack_results(b"".join(base64.b64decode(line, validate=True) for line in lines), out / name)
    print(f"wrote {fetched} files to {shown(str(out / name))}")


def find_job(jobs: Jobs, name: str) -> Job:
    """The run's job that has not ended, or else its newest job.

    Raises:
        UserError: The run has no job.
    """
    found = jobs.all()
    mine = [job for job in found if job.run == name]
    if not mine:
        there = ", ".join(sorted({job.run for job in found})) or "none"
        raise UserError(f"no job of a run {name}; runs with jobs: {there}")
    return next((job for job in reversed(mine) if not job.has_ended), mine[-1])


def _follow(jobs: Jobs, job: Job) -> int:
    name = job.run
    while True:
        try:
            ended = follow(jobs, job.id, _write)
            break
        except KeyboardInterrupt:
            if not _wants_to_stop(name):
                print(f"\nthe job runs on; `multihop attach {name}` follows it again", file=sys.stderr)
                return DETACHED
            jobs.stop(job.id)
    print(verdict(ended, name), file=sys.stderr)
    return exit_code(ended)


def _wants_to_stop(name: str) -> bool:
    """Ask; without a terminal, or with a second Ctrl-C, the job runs on."""
    if not sys.stdin.isatty():
        return False
    try:
        print(f"\nStop {name}? It saves a checkpoint first. [y: stop, Enter: leave it running]", file=sys.stderr)
        return input().strip().lower() in ("y", "yes", "stop")
    except (KeyboardInterrupt, EOFError):
        return False


def _folder(job: Job) -> str:
    return f"{job.metadata[RUNS]}/{job.run}"


def _write(text: str) -> None:
    sys.stdout.write(shown(text))
    sys.stdout.flush()


def _duration(job: Job) -> str:
    if job.started is None:
        return ""
    minutes, seconds = divmod(round((job.ended or time.time()) - job.started), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
