"""Follow a job from afar: each line of its output once, whatever happens to the connection; then its exit code."""

import sys
import time
from collections.abc import Callable

from multihop.cluster.ray.jobs import Job, Jobs, UnreachableError
from multihop.common.errors import DONE, FAILED, LOST, STOPPED, USER_ERROR

_RETRY_S = 2.0
_PATIENCE_S = 600.0
"""How long a head that does not answer is waited for: longer than its restart takes."""


def follow(jobs: Jobs, job_id: str, write: Callable[[str], object]) -> Job | None:
    """Write a job's output as it comes until it has ended.

    Ray sends the whole output to each new connection: what was written before is passed over.

    Returns:
        The job as it ended; None if the cluster does not know it any more, or does not answer for ten minutes.
    """
    written, answered, is_away = 0, time.monotonic(), False
    while True:
        try:
            seen = 0
            for chunk in jobs.follow(job_id):
                is_away = _say(is_away, False)
                new = chunk[max(0, written - seen) :]
                seen += len(chunk)
                if new:
                    write(new)
                    written += len(new)
            is_away = _say(is_away, False)
        except UnreachableError as error:
            is_away = _say(is_away, True, str(error))
            time.sleep(_RETRY_S)
        # Asked in any case: a cluster in the place of a lost one has no output to follow, and does not know the job.
        try:
            job = jobs.get(job_id)
        except UnreachableError as error:
            if time.monotonic() - answered > _PATIENCE_S:
                return None
            is_away = _say(is_away, True, str(error))
            continue
        if job is None:
            return None
        if job.has_ended:
            _write_rest(jobs, job, written, write)
            return job
        answered = time.monotonic()


def exit_code(job: Job | None) -> int:
    """That of the job's command; LOST where the cluster lost the job; never 0 for what did not succeed."""
    if job is None:
        return LOST
    if job.status == "SUCCEEDED":
        return DONE
    if job.status == "STOPPED":
        return STOPPED
    if job.exit_code is None:  # its supervisor or its node died
        return LOST
    return job.exit_code if job.exit_code in (FAILED, USER_ERROR, STOPPED) else FAILED


def verdict(job: Job | None, name: str) -> str:
    """How it ended, in one line."""
    code = exit_code(job)
    if job is None or code == LOST:
        why = f" ({job.message.splitlines()[0][:300]})" if job is not None and job.message else ""
        return f"{name} was lost with its cluster{why}; submit it again to resume from the newest checkpoint"
    if code == DONE:
        return f"{name} is done"
    if code == STOPPED:
        return f"{name} was stopped; submit it again to resume from the newest checkpoint"
    return f"{name} failed with exit code {job.exit_code}"


def _write_rest(jobs: Jobs, job: Job, written: int, write: Callable[[str], object]) -> None:
    """What was printed after the last chunk. Where the node with the output is gone, the last lines are in the
    message."""
    try:
        write(jobs.output(job.id)[written:])
    except UnreachableError:
        write(f"{job.message}\n")


def _say(is_away: bool, now_away: bool, why: str = "") -> bool:
    if now_away and not is_away:
        print(f"multihop: no answer from the cluster ({why}); trying again", file=sys.stderr)
    elif is_away and not now_away:
        print("multihop: the cluster answers again", file=sys.stderr)
    return now_away
