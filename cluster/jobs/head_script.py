"""Run a small job on a cluster's head, such as one of the programs of head_scripts/, and take what it prints."""

import json
import secrets
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from multihop.cluster.jobs import head_scripts
from multihop.cluster.jobs.archive import write_archive
from multihop.cluster.jobs.follow import follow_job
from multihop.cluster.ray.jobs import LARGEST_ARCHIVE, Jobs

_FOLDER = Path(head_scripts.__file__).parent


class HeadScriptFailed(Exception):
    """A program failed on the head; the message is the last line that it printed."""


def run_head_script(
    jobs: Jobs, program: str, arguments: Sequence[str], write: Callable[[str], object] | None = None
) -> str:
    """Run a program of head_scripts on the head, and remove its job once it has ended; returns what it printed.

    Args:
        write: takes the output as it comes.

    Raises:
        HeadScriptFailed: the program did not end with exit code 0.
    """
    command = "exec " + shlex.join(["python", "-m", _FOLDER.name, program, *arguments])
    files = {f"{_FOLDER.name}/{path.name}": path for path in _FOLDER.glob("*.py")}
    return run_head_job(jobs, program, command, {}, files, write or (lambda line: None))


def run_head_job(
    jobs: Jobs,
    name: str,
    command: str,
    contents: Mapping[str, bytes],
    files: Mapping[str, Path],
    write: Callable[[str], object],
) -> str:
    """Run a command on the head in a folder that is sent with it, and remove its job once it has ended; returns what
    it printed.

    Args:
        name: prefix of the job's id.
        contents, files: content of the folder, as `write_archive` takes it.
        write: takes the output line by line, as it comes.

    Raises:
        HeadScriptFailed: the program did not end with exit code 0.
        UserError: the files are too large to be sent.
    """
    job_id = f"multihop-{name}-{secrets.token_hex(6)}"
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "head_script.zip"
        write_archive(archive, contents, files, LARGEST_ARCHIVE)
        jobs.submit(job_id, command, archive, {})
    output = _Output(f"Running entrypoint for job {job_id}: {command}", write)
    try:
        ended = follow_job(jobs, job_id, output.take)
    except BaseException:
        jobs.stop(job_id)
        raise
    printed = output.all()
    if ended is not None:
        jobs.delete(job_id)
    if ended is None or ended.status != "SUCCEEDED":
        message = " ".join(ended.message.split()) if ended else ""
        raise HeadScriptFailed(printed.strip().rpartition("\n")[2] or message or "the head lost the job")
    return printed


def result_of(printed: str, prefix: str) -> Any:
    """Return the JSON value in the line of a job's output that begins with `prefix`.

    Raises:
        HeadScriptFailed: there is no such line.
    """
    for line in printed.splitlines():
        if line.startswith(prefix):
            return json.loads(line.removeprefix(prefix))
    raise HeadScriptFailed("the job printed no result")


class _Output:
    """What the program printed, without the two lines of Ray's: the first, and the command, which Ray writes while the
    program runs, so that it can be anywhere."""

    def __init__(self, command: str, write: Callable[[str], object]) -> None:
        self._command, self._write = command, write
        self._lines: list[str] = []
        self._begun = ""
        self._is_first = True

    def take(self, chunk: str) -> None:
        """Pass complete lines on to `write`."""
        *whole, self._begun = (self._begun + chunk).split("\n")
        for line in whole:
            if not self._is_first and line != self._command:
                self._lines.append(f"{line}\n")
                self._write(self._lines[-1])
            self._is_first = False

    def all(self) -> str:
        """Return the whole output, once the program has ended."""
        if self._begun:
            self._lines.append(self._begun)
            self._write(self._begun)
            self._begun = ""
        return "".join(self._lines)
