"""A Ray session: on an existing cluster, or started on this machine while the command runs."""

import logging
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from multihop.cluster.ray.map import RETRIES
from multihop.common.errors import UserError

_CONNECT_S = 5.0
_STARTS = 3
_SHUTDOWN_TIMEOUT_S = 15.0
_OBJECT_STORE_BYTES = 256 * 1024**2  # nothing large passes through it; shards and checkpoints are files


@contextmanager
def ray_session(address: str | None, workers: int) -> Iterator[None]:
    """Connect to Ray for the length of a block. A cluster that has no room for the ranks yet may get it later.

    Args:
        address: HOST:PORT of a cluster's head, `auto`, or None: RAY_ADDRESS if set, else start Ray on this machine.
        workers: number of ranks of the run.

    Raises:
        UserError: there is no cluster at the address, or this machine has fewer GPUs than ranks.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        check_answers(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault(
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20"
    )  # then the driver checks again how much room there is
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "1")
    # By default a task that has no room in memory is tried again for ever.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        cpus = max(len(os.sched_getaffinity(0)), workers)
        start = partial(start_ray, num_cpus=cpus, object_store_memory=_OBJECT_STORE_BYTES, **options)
    else:
        start = partial(_connect, address, **options)
    with _initialize(start):
        if address is None:
            _check_gpus(workers)
        yield


def session_address() -> str:
    """Return the address of the cluster of the present session, HOST:PORT."""
    import ray

    address: str = ray.get_runtime_context().gcs_address
    return address


@contextmanager
def _initialize(start: Callable[[], None]) -> Iterator[None]:
    """Initialize Ray with `start` and shut it down after the block, both in a dedicated thread.

    Python runs signal handlers in the main thread, and Ray forks, which runs fork hooks: an exception that a handler
    raises in such a hook is lost, and a lock of `logging` stays locked forever. With Ray in another thread, a signal
    interrupts the block and never a fork. Linux kills Ray's processes when the thread that started them exits
    (PR_SET_PDEATHSIG), so the thread lives as long as they do.
    """
    started: Future[None] = Future()
    ended = threading.Event()

    def live() -> None:
        # Ctrl-C goes to the whole process group. Ray blocks it in its processes, but only after it has forked them: one
        # could die in between.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            import ray

            logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns that it cannot handle signals in this thread
            start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        ended.wait()
        ray.shutdown()

    thread = threading.Thread(target=live, name="Ray session", daemon=True)
    thread.start()
    try:
        started.result()
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None and threading.current_thread() is threading.main_thread():
            # Ray has put a handler before this one that prints a stack trace, as of a crash.
            signal.signal(signal.SIGTERM, handler)
        yield
    except BaseException:
        ended.set()
        # With a timeout: the signal may have killed Ray's processes as well. What is left exits with this process.
        thread.join(_SHUTDOWN_TIMEOUT_S)
        raise
    ended.set()
    thread.join()


def start_ray(**options: Any) -> None:
    """Start Ray on this machine, without its dashboard. On a busy machine it may not be up within the 30 seconds that
    it allows itself: it is started again then.

    Args:
        options: options of `ray.init`.
    """
    import ray

    # By default Ray writes a token to the home directory, which may be read-only. A token in memory is enough: this Ray
    # exits with this process.
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    options["runtime_env"] = _py_executable() | options.get("runtime_env", {})
    for left in reversed(range(_STARTS)):
        try:
            ray.init(address="local", include_dashboard=False, **options)
            return
        except Exception as error:  # of no other type
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def _py_executable() -> dict[str, str]:
    """Return a runtime environment with the quoted path of this interpreter, if a shell would interpret characters in
    it.

    Ray passes its default, the interpreter of each node, to a shell without quotes.
    """
    quoted = shlex.quote(sys.executable)
    return {} if quoted == sys.executable else {"py_executable": quoted}


def _connect(address: str, **options: Any) -> None:
    import ray

    try:
        ray.init(address=address, runtime_env=_py_executable(), **options)
    except (ConnectionError, RuntimeError) as error:
        raise UserError(
            f"cluster.address={address}: cannot connect to Ray ({' '.join(str(error).split())[:200]}); "
            "start it with `ray start --head`, set the RAY_AUTH_MODE and RAY_AUTH_TOKEN that it was started with, or "
            "omit the address to run on this machine"
        ) from None


def check_answers(address: str | None) -> None:
    """Check that something listens at a cluster's address; Ray itself would retry for a minute.

    Raises:
        UserError: nothing does, or the address is malformed.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if address in (None, "auto", "local"):
        return
    try:
        url = urlsplit(address if "://" in address else f"//{address}")
        host, port = url.hostname, url.port
        if host is None or port is None:
            raise ValueError
    except ValueError:
        raise UserError(f"cluster.address={address} is not HOST:PORT, for example 10.0.0.1:6379") from None
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise UserError(
            f"cluster.address={address} is unreachable ({error.strerror or error}); start Ray there with "
            "`ray start --head`, or omit the address to run on this machine"
        ) from None


def _check_gpus(workers: int) -> None:
    import ray

    gpus = ray.cluster_resources().get("GPU", 0)
    if 0 < gpus < workers:
        raise UserError(f"cluster.workers={workers}, but this machine has {gpus:.0f} GPUs; lower cluster.workers")
