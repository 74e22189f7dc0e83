"""A Ray Train actor: runs `python -m multihop.pretrain.run.worker RUN_DIR` as a child process that dies with the actor.

The actor does not import torch, which would add seconds to every start and restart.
"""

import ctypes
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from multihop.cluster.ray.each_node import free_port, interface_of
from multihop.cluster.remote.node_cache import (
    LOST_FILE,
    RemoteRunSpec,
    download_requests,
    fetch_data,
    fetch_requested_shards,
    fetch_run,
    log_of,
    upload_logs,
)
from multihop.common.errors import DONE, STOPPED, USER_ERROR, UserError
from multihop.common.files import write_atomically
from multihop.pretrain.environment import LAUNCH, REMOTE_RUN, SECRET, SUPERVISED, TIMES
from multihop.pretrain.run.files import GAVE_UP
from multihop.pretrain.run.standby import ForkedRank, StandbyLost, start_rank

_LOST_POLL_S = 0.5
_LAST_LINE_S = 1.0
_CAUSE_FIRST_S = 2.0
"""A rank that exits with an error waits this long before it reports it: Ray Train stops all ranks at the first report,
which should be that of a rank that was killed, not that of another rank's broken connection to it."""

log = logging.getLogger(__name__)


def run_rank(config: dict[str, Any]) -> None:
    """Run this rank's worker as a child process until it exits.

    Raises:
        RuntimeError: the worker failed.
    """
    from ray import train

    if config["remote"] is None:
        _run(Path(config["run_dir"]), config, _no_failure)
        return
    spec, rank = RemoteRunSpec(**config["remote"]), train.get_context().get_world_rank()
    failure: Callable[[], str | None] = _no_failure
    config["environment"] |= {REMOTE_RUN: spec.location, LAUNCH: str(config["launch"])}
    with ExitStack() as stack:
        try:
            data = stack.enter_context(fetch_data(spec))
            run_dir = fetch_run(spec, data)
        except UserError as error:
            raise RuntimeError(f"{socket.gethostname()}: {error}") from None
        log_file = log_of(run_dir, rank)
        log_from = log_file.stat().st_size if log_file.exists() else 0
        stack.enter_context(download_requests(spec, run_dir))
        stack.callback(upload_logs, spec, config["launch"], run_dir, rank, log_from)
        if spec.streams:
            failure = stack.enter_context(fetch_requested_shards(spec, run_dir, data))
        _run(run_dir, config, failure)


def _no_failure() -> None:
    """Return None: no reason to end the ranks."""


def _run(run_dir: Path, config: dict[str, Any], failure: Callable[[], str | None]) -> None:
    """Run the worker in `run_dir`.

    Args:
        failure: returns why the ranks of this node cannot go on, or None.
    """
    from ray import get_runtime_context, train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    gave_up = run_dir / GAVE_UP
    if gave_up.exists():
        return
    if missing := [name for name in config["required_variables"] if name not in os.environ]:
        message = (
            f"cluster.env: {socket.gethostname()} has no {', '.join(missing)} in its environment; set it before `ray "
            "start` on each node"
        )
        write_atomically(gave_up, json.dumps({"code": USER_ERROR, "message": message}).encode())
        raise RuntimeError(message)  # ends the other ranks, which would wait for this one
    context = train.get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    on_one_host = context.get_local_world_size() == context.get_world_size()
    host = "127.0.0.1" if on_one_host else get_node_ip_address()
    endpoint = broadcast_from_rank_zero(
        {"host": host, "port": free_port(host), "secret": secrets.token_hex(32)} if rank == 0 else None
    )
    assert endpoint is not None
    times = json.loads(config["environment"].get(TIMES, "{}")) | {"placed": time.time()}
    cores = _cores()
    sees_one_gpu = "," not in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    environment = {
        **os.environ,
        **config["environment"],
        SUPERVISED: "1",
        TIMES: json.dumps(times),
        SECRET: endpoint["secret"],
        "RANK": str(rank),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "LOCAL_RANK": "0" if sees_one_gpu else str(local_rank),
        "MASTER_ADDR": endpoint["host"],
        "MASTER_PORT": str(endpoint["port"]),
        "OMP_NUM_THREADS": str(max(1, cores // context.get_local_world_size())),
        "GLOO_SOCKET_IFNAME": interface_of(host),
    }
    child = _start_process(run_dir, environment, config["standbys"].get(get_runtime_context().get_node_id()))
    last_line: list[str] = [""]
    reader = threading.Thread(target=_keep_last_line, args=(child, last_line), daemon=True)
    reader.start()
    # Do not wait for the end of its output: children of a killed rank may keep it open for a while, and another rank's
    # broken connection would then be reported as the cause.
    code = _wait_for_exit(child, run_dir / LOST_FILE, failure)
    reader.join(_LAST_LINE_S)
    if code not in (DONE, STOPPED) and not gave_up.exists():
        detail = f": {last_line[0]}" if last_line[0] else ""
        what = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}{detail}"
        if code > 0 and context.get_world_size() > 1:
            time.sleep(_CAUSE_FIRST_S)
        raise RuntimeError(f"rank {rank} on {socket.gethostname()} {what}")


def _cores() -> int:
    """Return the cores of this node that Ray may use: fewer than the machine's in a container with a limit, or where
    `ray start --num-cpus` says so."""
    import ray

    cores, node = len(os.sched_getaffinity(0)), ray.get_runtime_context().get_node_id()
    offered = next((int(each["Resources"].get("CPU", 0)) for each in ray.nodes() if each["NodeID"] == node), 0)
    return min(cores, offered) if offered else cores


def _start_process(
    run_dir: Path, environment: dict[str, str], standby: str | None
) -> "subprocess.Popen[str] | ForkedRank":
    """Start this rank's process: the standby process of this node becomes it, if there is one."""
    if standby is not None:
        try:
            return start_rank(standby, str(run_dir), environment)
        except StandbyLost as error:
            log.warning("the standby process is gone (%s); the rank imports by itself", error)
    return subprocess.Popen(
        # -P: a directory `pretrain` in the working directory must not shadow the package.
        [sys.executable, "-P", "-m", "multihop.pretrain.run.worker", str(run_dir)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
    )


def _wait_for_exit(child: "subprocess.Popen[str] | ForkedRank", lost: Path, failure: Callable[[], str | None]) -> int:
    """Wait for a rank's process and return its exit code. Kill it if another rank's node is lost, or this node fails.

    Raises:
        RuntimeError: the process was killed.
    """
    while True:
        try:
            return child.wait(_LOST_POLL_S)
        except subprocess.TimeoutExpired:
            # Its collectives would wait for the lost ranks until they time out.
            if reason := lost.read_text() if lost.exists() else failure():
                child.kill()
                child.wait()
                raise RuntimeError(reason) from None


def _keep_last_line(child: "subprocess.Popen[str] | ForkedRank", last_line: list[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        last_line[0] = line.strip() or last_line[0]


def _die_with_parent() -> None:
    """Have Linux kill the child when the thread that started it ends, for whatever reason."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Ray blocks SIGINT in its processes, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
