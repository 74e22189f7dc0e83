"""A simulated cluster's head: the jobs of a world, as Ray describes them to its clients."""

import io
import json
import shlex
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from multihop.cluster.jobs.head_scripts import inspect_head, run_files
from multihop.cluster.ray.jobs import Jobs
from simulation.world import World

JOB_S = 100.0
"""Seconds for which a run's job runs."""


@dataclass
class _Job:
    submission_id: str
    metadata: dict[str, str]
    started: float
    ends: float
    output: str = ""
    stopped: bool = False


class SimulatedHead:
    """Takes the place of Ray's `JobSubmissionClient`; a job with metadata is that of a run, others are head scripts."""

    def __init__(self, world: World) -> None:
        """Start without jobs."""
        self._world = world
        self.jobs: dict[str, _Job] = {}

    def connection(self) -> Jobs:
        """A connection to this head."""
        jobs = Jobs.__new__(Jobs)
        jobs._client = self
        return jobs

    def submit_job(self, *, entrypoint: str, submission_id: str, metadata: dict[str, str], **_: Any) -> str:
        """Start a job."""

        def submitted() -> str:
            if submission_id in self.jobs:
                raise RuntimeError(f"status code 500: Job with submission_id {submission_id} already exists")
            now, is_run = self._world.time, len(metadata) > 1
            job = self.jobs[submission_id] = _Job(submission_id, metadata, now, now + JOB_S if is_run else now)
            if not is_run:
                job.output = f"first line\n{_output_of(entrypoint)}"
            return submission_id

        return self._world.operate(f"tell submit {submission_id}", submitted)

    def list_jobs(self) -> list[Any]:
        """Describe all jobs."""
        return self._world.operate("ask list", lambda: [self._describe(job) for job in self.jobs.values()])

    def get_job_info(self, job_id: str) -> Any:
        """Describe a job."""

        def info() -> Any:
            if job_id not in self.jobs:
                raise RuntimeError("status code 404")
            return self._describe(self.jobs[job_id])

        return self._world.operate(f"ask {job_id}", info)

    def stop_job(self, job_id: str) -> None:
        """End a job."""

        def stopped() -> None:
            job = self.jobs[job_id]
            job.stopped, job.ends = True, min(job.ends, self._world.time)

        self._world.operate(f"tell stop {job_id}", stopped)

    def delete_job(self, job_id: str) -> None:
        """Forget a job."""

        def deleted() -> None:
            if self.jobs.pop(job_id, None) is None:
                raise RuntimeError("status code 404")

        self._world.operate(f"tell delete {job_id}", deleted)

    def get_job_logs(self, job_id: str) -> str:
        """Return what a job has printed."""
        return self._world.operate(f"ask output {job_id}", lambda: self.jobs[job_id].output)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield what a job has printed, in two parts."""
        text = self.get_job_logs(job_id)
        for part in (text[: len(text) // 2], text[len(text) // 2 :]):
            yield self._world.operate(f"ask part {job_id}", lambda part=part: part)

    def _describe(self, job: _Job) -> Any:
        ended = job.ends <= self._world.time
        return SimpleNamespace(
            submission_id=job.submission_id,
            metadata=job.metadata,
            message="",
            driver_exit_code=0 if ended else None,
            status="STOPPED" if job.stopped else "SUCCEEDED" if ended else "RUNNING",
            start_time=job.started * 1000,
            end_time=job.ends * 1000 if ended else None,
        )


def _output_of(entrypoint: str) -> str:
    """Run a head script in this process."""
    _, _, _, _, program, *arguments = shlex.split(entrypoint)
    if program == "inspect":
        recipe = inspect_head.recipe_of(*arguments)
        report = {"code": "same", "versions": inspect_head.installed_versions(), "recipe": recipe}
        return f"{inspect_head.RESULT_PREFIX}{json.dumps(report)}\n"
    assert program == "pack-results", program
    with (
        tempfile.TemporaryFile("w+") as printed,
        mock.patch("sys.stdout", printed),
        mock.patch.object(run_files, "_truncate_later", lambda output: None),
    ):
        run_files.pack_results(*arguments)
        printed.seek(io.SEEK_SET)
        return printed.read()
