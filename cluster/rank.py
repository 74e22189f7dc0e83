"""What a Ray Train actor does: it runs `python -m pretrain.worker RUN_DIR` as a child process that dies with it.

The actor itself never imports torch: that would cost every start and every restart seconds.
"""

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pretrain.run_files import GAVE_UP
from pretrain.starting import SECRET, STOPPED, SUPERVISED, TIMES

_LAST_WORDS_S = 1.0


def run_rank(config: dict[str, Any]) -> None:
    """One Ray Train actor's part: run this rank's worker as a child process until it ends.

    Raises:
        RuntimeError: it did not end well; Ray Train restarts all ranks.
    """
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    gave_up = Path(config["run_dir"]) / GAVE_UP
    if gave_up.exists():
        return
    context = train.get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    on_one_host = context.get_local_world_size() == context.get_world_size()
    host = "127.0.0.1" if on_one_host else get_node_ip_address()
    endpoint = broadcast_from_rank_zero(
        {"host": host, "port": _free_port(host), "secret": secrets.token_hex(32)} if rank == 0 else None
    )
    assert endpoint is not None
    times = json.loads(config["environment"].get(TIMES, "{}")) | {"placed": time.time()}
    cores = len(os.sched_getaffinity(0))
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
        "GLOO_SOCKET_IFNAME": _interface_of(host),
    }
    child = subprocess.Popen(
        # -P: not from a folder `pretrain` of another version in which the command happened to be given.
        [sys.executable, "-P", "-m", "pretrain.worker", config["run_dir"]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
    )
    said: list[str] = [""]
    reader = threading.Thread(target=_keep_last_line, args=(child, said), daemon=True)
    reader.start()
    # Not until it closes its output: processes of a rank that was killed may hold on to that for a while, and another
    # rank's broken connection would be taken for the cause.
    code = child.wait()
    reader.join(_LAST_WORDS_S)
    if code not in (0, STOPPED) and not gave_up.exists():
        what = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}{said[0] and f': {said[0]}'}"
        raise RuntimeError(f"rank {rank} on {socket.gethostname()} {what}")


def _keep_last_line(child: "subprocess.Popen[str]", said: list[str]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        said[0] = line.strip() or said[0]


def _die_with_parent() -> None:
    """Ask Linux to kill the child when the thread that started it is gone, however that came about."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    # Ray blocks SIGINT in its processes, and a child inherits that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _interface_of(host: str) -> str:
    """The network interface with this address: gloo would take the first one, which others may not reach."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise RuntimeError(f"no network interface has Ray's address {host}")
