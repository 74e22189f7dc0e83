"""Follows a job from another machine: each line of its output once, across lost connections; then its exit code."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from multihop.cluster.ray.jobs import Job, Jobs, UnreachableError
from multihop.common import clock
from multihop.common.errors import DONE, FAILED, LOST, STOPPED, USER_ERROR

_RETRY_S = 2.0
_PATIENCE_S = 600.0
"""Seconds to wait for a head that does not answer, longer than its restart takes."""


@dataclass
class _Progress:
    """What has been followed of a job's output."""

    written: int = 0
    """Number of characters that were written."""
    answered: float = field(default_factory=lambda: clock.monotonic())
    """When the cluster last answered (`clock.monotonic`)."""
    is_unreachable: bool = False

    def on_answer(self) -> None:
        self.answered = clock.monotonic()
        if self.is_unreachable:
            print("multihop: the cluster answers again", file=sys.stderr)
        self.is_unreachable = False

    def on_silence(self, reason: str) -> None:
        if not self.is_unreachable:
            print(f"multihop: no answer from the cluster ({reason}); trying again", file=sys.stderr)
        self.is_unreachable = True


def follow_job(
    jobs: Jobs, job_id: str, write: Callable[[str], object], on_interrupt: Callable[[], object] | None = None
) -> Job | None:
    """Write a job's output as it comes until it has ended.

    Ray sends the whole output to each new connection: what was written before is skipped.

    Args:
        on_interrupt: called at a KeyboardInterrupt; unless it raises, following continues with the next line.

    Returns:
        The job as it ended; None if the cluster does not know it any more, or does not answer for ten minutes.
    """
    progress = _Progress()
    while True:
        try:
            return _follow(jobs, job_id, write, progress)
        except KeyboardInterrupt:
            if on_interrupt is None:
                raise
            on_interrupt()


def _follow(jobs: Jobs, job_id: str, write: Callable[[str], object], progress: _Progress) -> Job | None:
    while True:
        try:
            received = 0
            for chunk in jobs.tail_output(job_id):
                progress.on_answer()
                new = chunk[max(0, progress.written - received) :]
                received += len(chunk)
                if new:
                    write(new)
                    progress.written += len(new)
            progress.on_answer()
        except UnreachableError as error:
            progress.on_silence(str(error))
            clock.sleep(_RETRY_S)
        # Checked in any case: a cluster that replaced a lost one has no output to follow, and does not know the job.
        try:
            job = jobs.get(job_id)
        except UnreachableError as error:
            if clock.monotonic() - progress.answered > _PATIENCE_S:
                return None
            progress.on_silence(str(error))
            continue
        if job is None:
            return None
        if job.has_ended:
            _write_rest(jobs, job, progress.written, write)
            return job
        progress.answered = clock.monotonic()


def exit_code(job: Job | None) -> int:
    """Return the exit code of the job's command; LOST if the cluster lost the job; never 0 for a job that did not
    succeed."""
    if job is None:
        return LOST
    if job.status == "SUCCEEDED":
        return DONE
    if job.status == "STOPPED":
        return STOPPED
    if job.exit_code is None:  # its supervisor or its node died
        return LOST
    return job.exit_code if job.exit_code in (FAILED, USER_ERROR, STOPPED) else FAILED


def outcome(job: Job | None, name: str) -> str:
    """Return one line about how the job ended."""
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
    """Write what was printed after the last chunk. If the node with the output is gone, the last lines are in the job's
    message."""
    try:
        write(jobs.output(job.id)[written:])
    except UnreachableError:
        write(f"{job.message}\n")
