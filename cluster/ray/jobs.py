"""Ray Jobs over HTTP: the requests of a machine outside a cluster to its head."""

import asyncio
import json
import logging
import math
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multihop.common import clock
from multihop.common.errors import UserError

RUN, RUNS, CONTENT, CODE, COMMIT, RECIPE = (
    f"multihop.{key}" for key in ("run", "runs", "content", "code", "commit", "recipe")
)
"""Keys of a job's metadata."""
_CALL_KEY = "multihop.call"
"""Key of the metadata whose random value identifies the call that submitted the job."""
DASHBOARD_NAME = "job_name"
"""The key of the metadata that Ray's dashboard shows as a job's name."""
JOB = "MULTIHOP_JOB"
"""Environment variable of a job's command and what it starts, with the job's id."""
LARGEST_ARCHIVE = 512 * 2**20
"""Bytes that Ray takes as a job's folder: the size of its messages, unless RAY_max_grpc_message_size is set."""
_ADDRESS = "RAY_API_SERVER_ADDRESS"
_REQUEST_S, _SILENCE_S = 60.0, 60.0
_PATIENCE_S, _RETRY_S = 60.0, 1.0
_STOP_S = 7 * 24 * 3600
"""Seconds that Ray waits between SIGTERM and SIGKILL when it stops a job; its default, 3, is too short for a save."""
_ENDED = {"STOPPED", "SUCCEEDED", "FAILED"}


class UnreachableError(ConnectionError):
    """The cluster's head does not answer, or is not ready."""


@dataclass(frozen=True)
class Job:
    """A job as the head describes it."""

    id: str
    status: str
    """PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED."""
    exit_code: int | None
    """Exit code of the command; None if it was stopped, or did not end by itself."""
    message: str
    started: float | None
    ended: float | None
    """Seconds since the epoch."""
    metadata: dict[str, str]

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.metadata.get(RUN, "")

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe it was submitted with."""
        content: dict[str, Any] = json.loads(self.metadata.get(RECIPE, "{}"))
        return content

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in _ENDED


class Jobs:
    """A connection to the jobs of a cluster. Every call retries for a minute if the head does not answer, as
    when it has just started, and then raises UnreachableError."""

    def __init__(self, address: str) -> None:
        """Connect.

        Raises:
            UserError: the address is not a URL, nothing answers at it, or the token is refused.
        """
        if not address.startswith(("http://", "https://")):  # Ray would try to connect to a cluster, for minutes
            raise UserError(f"--address={address} is not the URL of a Ray dashboard; give http://HOST:8265")
        from ray.job_submission import JobSubmissionClient

        class Client(JobSubmissionClient):
            def _do_request(self, *args: Any, **kwargs: Any) -> Any:
                return super()._do_request(*args, **{"timeout": _REQUEST_S, **kwargs})

        for module in ("dashboard_sdk", "job.sdk"):
            logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
        os.environ.pop(_ADDRESS, None)  # Ray would prefer it to the argument
        try:
            self._client = Client(address)
        except Exception as error:  # Ray raises RuntimeError, ConnectionError and those of requests
            if "Authentication " in str(error):
                raise UserError(
                    f"--address={address}: the cluster refuses the token ({_first_line(error)}); set "
                    "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the token with which the cluster was started"
                ) from None
            raise UserError(
                f"--address={address}: no Ray dashboard answers at it ({_first_line(error)}); give the head's, for "
                "example http://10.0.0.1:8265, and set RAY_AUTH_MODE and RAY_AUTH_TOKEN if the cluster has a token"
            ) from None

    def submit(self, job_id: str, command: str, archive: Path, metadata: dict[str, str]) -> bool:
        """Start a job in the folder that `archive`, a .zip file, is unpacked to; false if another one has this id."""
        environment = {"working_dir": str(archive), "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_S)}}
        call = secrets.token_hex(8)
        answer = self._call(
            self._client.submit_job,
            unless="already exists",
            entrypoint=command,
            submission_id=job_id,
            runtime_env=environment,
            metadata=metadata | {_CALL_KEY: call},
        )
        if answer is not None:
            return True
        job = self.get(job_id)  # it may be from this very call, if the response was lost
        return job is not None and job.metadata.get(_CALL_KEY) == call

    def all(self) -> list[Job]:
        """Return the jobs that this project submitted, the oldest first."""
        jobs = [_job(details) for details in self._call(self._client.list_jobs) if details.submission_id]
        return sorted((job for job in jobs if RUN in job.metadata), key=lambda job: job.started or math.inf)

    def get(self, job_id: str) -> Job | None:
        """Return the job; None if the head does not know it."""
        details = self._call(self._client.get_job_info, job_id, unless="status code 404")
        return None if details is None else _job(details)

    def stop(self, job_id: str) -> None:
        """Send SIGTERM to a job's processes."""
        self._call(self._client.stop_job, job_id)

    def delete(self, job_id: str) -> None:
        """Remove an ended job from the list."""
        self._call(self._client.delete_job, job_id, unless="status code 404")

    def output(self, job_id: str) -> str:
        """Return the whole output of a job."""
        text: str = self._call(self._client.get_job_logs, job_id)
        return text

    def tail_output(self, job_id: str) -> Iterator[str]:
        """Yield what a job prints, from its first line until it ends or the connection breaks.

        Ends as well when nothing was printed for a minute: a broken link looks like silence.
        """
        chunks = self._client.tail_job_logs(job_id)
        with asyncio.Runner() as runner:
            while True:
                try:
                    chunk = runner.run(asyncio.wait_for(_next(chunks), _SILENCE_S))
                except TimeoutError:
                    return
                except Exception as error:  # aiohttp's, and Ray's RuntimeError
                    raise UnreachableError(_first_line(error)) from None
                if chunk is None:
                    return
                yield chunk

    def _call(self, call: Callable[..., Any], *arguments: Any, unless: str | None = None, **named: Any) -> Any:
        """Call the head, retrying for a minute; None if the error contains `unless`, which is an answer too."""
        deadline = clock.monotonic() + _PATIENCE_S
        while True:
            try:
                return call(*arguments, **named)
            except Exception as error:  # Ray's RuntimeError, and those of requests
                if unless is not None and unless in str(error):
                    return None
                if clock.monotonic() > deadline or "status code 4" in str(error):
                    raise UnreachableError(f"the cluster failed the request: {_first_line(error)}") from None
            clock.sleep(_RETRY_S)


async def _next(chunks: AsyncIterator[str]) -> str | None:
    try:
        return await chunks.__anext__()
    except StopAsyncIteration:
        return None


def _job(details: Any) -> Job:
    def seconds(milliseconds: int | None) -> float | None:
        return milliseconds / 1000 if milliseconds else None

    return Job(
        id=details.submission_id,
        status=str(getattr(details.status, "value", details.status)),
        exit_code=details.driver_exit_code,
        message=details.message or "",
        started=seconds(details.start_time),
        ended=seconds(details.end_time),
        metadata=details.metadata or {},
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
