"""How the test process ends: with the tests' own exit status, and not in the tear-down of native libraries.

Arrow's S3 client, gloo and Ray's core worker keep threads of their own. The interpreter crashed while it was torn down,
in a run whose tests had all passed.
"""

import atexit
import os
import sys
import threading
import time

import pytest

_GRACE_S = 20.0
_status = 0


def pytest_sessionfinish(exitstatus: int | pytest.ExitCode) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End as the interpreter would, up to the tear-down: what is registered for the exit is done, and a thread that
    would keep the process alive is named and is a failure."""
    until = time.monotonic() + _GRACE_S
    while (left := _threads_left()) and time.monotonic() < until:
        time.sleep(0.1)
    atexit._run_exitfuncs()
    status = _status
    if left:
        print(f"a test left threads that keep the process alive: {', '.join(left)}", file=sys.stderr)
        status = status or 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _threads_left() -> list[str]:
    main = threading.main_thread()
    return [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
