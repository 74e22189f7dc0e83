"""The end of a command: its exit code, and the sentence that it prints for an error."""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from multihop.cluster.interrupts import is_interrupted
from multihop.common.errors import FAILED, STOPPED, USER_ERROR, PlanningFailed, UserError
from multihop.common.files import DISK_FULL
from multihop.common.redaction import safe_text
from multihop.data_prep.reading.errors import ReadFailed

_ADVICE = {
    errno.EACCES: "get access from its owner",
    errno.EPERM: "get access from its owner",
    errno.EROFS: "remount it read-write",
    **dict.fromkeys(DISK_FULL, "free disk space"),
}
_MISTAKES = {
    errno.EEXIST: "exists and is not a directory; remove it, or give another path",
    errno.ENOTDIR: "is below a file, not a directory; give another path",
    errno.EISDIR: "is a directory, not a file; give another path",
    errno.ENAMETOOLONG: "is too long; give a shorter path",
    errno.ELOOP: "contains a loop of symbolic links; give another path",
}
"""Errors of the user's paths: the text after the path in the message."""


_EXTRA_OF = {
    **dict.fromkeys(("jinja2", "matplotlib", "seqeval", "sklearn"), "eval"),
    **dict.fromkeys(("mlflow", "ray"), "cluster"),
}
"""The extra of this package that installs a module."""


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Exit with a sentence if the user, the disk or an unreachable store caused the error; other errors pass."""
    try:
        yield
    except UserError as error:
        _exit(error, USER_ERROR)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRA_OF:
            raise
        _exit(f"this command needs {name}, which is missing; pip install 'multihop[{_EXTRA_OF[name]}]'", USER_ERROR)
    except ReadFailed as error:
        _exit(error, FAILED, "; rerun the same command to resume")
    except (ConnectionError, PlanningFailed) as error:
        _exit(error, FAILED)
    except OSError as error:
        if error.errno is None and str(error).startswith("s3://"):  # the library has tried for minutes
            _exit(error, FAILED, "; rerun the same command to resume")
        if error.errno in _MISTAKES and error.filename is not None:
            _exit(f"{error.filename2 or error.filename} {_MISTAKES[error.errno]}", USER_ERROR)
        if error.errno not in _ADVICE:
            raise
        what = error if error.filename is None else f"{error.filename}: {error.strerror}"
        _exit(what, FAILED, f"; {_ADVICE[error.errno]} and rerun the same command")


def _exit(what: Exception | str, code: int, advice: str = "") -> NoReturn:
    print(f"multihop: {safe_text(str(what))}{advice}", file=sys.stderr)
    sys.exit(code)


def exit_with(work: Callable[[], int], rerun_to: str = "resume") -> None:
    """Run `work` and exit with the code that it returns; STOPPED if it is interrupted.

    Args:
        rerun_to: what the same command does after an interruption.
    """
    from multihop.cluster.ray import TrainingFailed, WorkerDiedError

    try:
        code = work()
    except KeyboardInterrupt:
        _exit_stopped(rerun_to)
    except (TrainingFailed, WorkerDiedError) as error:
        print(f"multihop: {safe_text(str(error))}", file=sys.stderr)
        code = FAILED
    except Exception as error:
        if not is_interrupted() or isinstance(error, UserError):
            raise
        # In Ray's compiled code a KeyboardInterrupt can become another error.
        _exit_stopped(rerun_to, f" ({type(error).__name__}: {safe_text(str(error))})")
    raise typer.Exit(code)


def _exit_stopped(rerun_to: str, error: str = "") -> NoReturn:
    print(f"\nmultihop: stopped{error}; rerun the same command to {rerun_to}", file=sys.stderr)
    # Everything is closed. Exit handlers of libraries may wait for processes that the signal has ended as well.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STOPPED)
