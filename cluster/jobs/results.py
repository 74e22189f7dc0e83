"""Reads what a run on a cluster has written from another machine: its job, the log of a rank, and its results."""

import base64
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

from multihop.cluster.jobs.head_script import HeadScriptFailed, run_head_script
from multihop.cluster.jobs.head_scripts.processes import OFFSET_PREFIX
from multihop.cluster.jobs.head_scripts.run_files import RESULT_PREFIX, RESULTS, match_files, matches
from multihop.cluster.ray.jobs import JOB, RUNS, Job, Jobs
from multihop.common.errors import UserError
from multihop.common.files import make_folder, remove_temporaries, write_atomically

_FOLLOW_TIMEOUT_S = 600
"""Seconds for which one job on the head follows a log before this process starts the next: the head cannot see whether
this process is still alive."""


def find_job(jobs: Jobs, name: str) -> Job:
    """Return the run's job that has not ended, or else its newest job.

    Raises:
        UserError: the run has no job.
    """
    every = jobs.all()
    of_run = [job for job in every if job.run == name]
    if not of_run:
        existing = ", ".join(sorted({job.run for job in every})) or "none"
        raise UserError(f"the run {name} has no job; runs with jobs: {existing}")
    return next((job for job in reversed(of_run) if not job.has_ended), of_run[-1])


def follow_rank_log(jobs: Jobs, job: Job, rank: int, following: bool, write: Callable[[str], object]) -> None:
    """Write the lines of a rank's log; if `following`, also what is appended to it until the job ends.

    Raises:
        HeadScriptFailed: there is no such log, or it cannot be read.
    """
    read_to = 0

    def take(line: str) -> None:
        nonlocal read_to
        if line.startswith(OFFSET_PREFIX):
            read_to = int(line.removeprefix(OFFSET_PREFIX))
        else:
            write(line)

    while True:
        now = jobs.get(job.id) if following else None
        goes_on = now is not None and not now.has_ended
        of_job = [JOB, job.id, str(_FOLLOW_TIMEOUT_S)] if goes_on else []
        run_head_script(jobs, "print-log", [_run_dir(job), str(rank), str(read_to), *of_job], take)
        if not goes_on:
            return


def fetch_results(jobs: Jobs, job: Job, folder: Path) -> int:
    """Copy report, results, metrics and recipe of a run into a local folder, replacing those of an earlier fetch.

    Returns:
        Number of files that were written.

    Raises:
        UserError: the run has no results, or as `unpack_results`.
    """
    try:
        printed = run_head_script(jobs, "pack-results", [_run_dir(job)])
    except HeadScriptFailed as error:
        raise UserError(str(error)) from None
    lines = [line.removeprefix(RESULT_PREFIX) for line in printed.splitlines() if line.startswith(RESULT_PREFIX)]
    return unpack_results(b"".join(base64.b64decode(line, validate=True) for line in lines), folder)


def unpack_results(archive: bytes, folder: Path) -> int:
    """Replace the results of an earlier fetch in `folder` with those in a gzipped tar archive.

    Other files stay. Nothing is written through a symbolic link in the directory.

    Returns:
        Number of files that were written.

    Raises:
        UserError: a local file or link has the name of a directory of the results, or a directory that of a file.
    """
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
        # The head may be malicious: take only the expected names, and no links.
        entries = [each for each in packed if each.isfile() and any(matches(each.name, wanted) for wanted in RESULTS)]
        files = {entry.name: packed.extractfile(entry).read() for entry in entries}  # type: ignore[union-attr]
    for parent in {(folder / name).parent for name in RESULTS}:
        if (parent.exists() and not parent.is_dir()) or (parent != folder and parent.is_symlink()):
            raise UserError(f"{parent} is not a directory; move it away, or choose another --out")
    if blocked := next((name for name in files if (folder / name).is_dir()), None):
        raise UserError(f"{folder / blocked} is a directory; move it away, or choose another --out")
    for name in match_files(str(folder), RESULTS):
        (folder / name).unlink()
    for name, content in files.items():
        make_folder((folder / name).parent)
        remove_temporaries((folder / name).parent, of=Path(name).name)  # of a fetch that was killed
        write_atomically(folder / name, content, mode=0o600 if name == "recipe.json" else 0o666)
    return len(files)


def _run_dir(job: Job) -> str:
    return f"{job.metadata[RUNS]}/{job.run}"
