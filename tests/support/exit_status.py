"""End the test processes with the exit status of the tests, without the tear-down of native libraries.

Arrow's S3 client, gloo and Ray's core worker keep threads of their own. The interpreter crashed in its tear-down after
a run whose tests had all passed. A thread that would keep a process alive is reported as a failure.
"""

import atexit
import os
import sys
import threading
import time
from typing import Any

import pytest

_GRACE_S = 20.0
_LEFT = "threads_left"
_status = 0
_left: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    global _status
    _status = int(exitstatus)
    until = time.monotonic() + _GRACE_S
    while (left := _threads_left()) and time.monotonic() < until:
        time.sleep(0.1)
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is None:
        _left.extend(left)
    else:  # one of several processes that run tests; the first one reports
        told[_LEFT] = left


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Collect the threads that an ended test process reported; one that crashed reported none."""
    _left.extend(getattr(node, "workeroutput", {}).get(_LEFT, []))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Exit as the interpreter would, but without its tear-down: functions registered for the exit are called."""
    if hasattr(config, "workeroutput"):
        return  # its exit status is not used
    atexit._run_exitfuncs()
    status = _status
    if _left:
        print(f"a test left threads that keep the process alive: {', '.join(_left)}", file=sys.stderr)
        status = status or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _threads_left() -> list[str]:
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
