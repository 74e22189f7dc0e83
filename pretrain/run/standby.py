"""A process that has imported everything a rank needs, and forks ranks.

Its command is `python -m multihop.pretrain.run.standby RUN_DIR`.
Importing torch and DeepSpeed takes 5 to 15 s, which such a process saves at a restart. It prints the name of its socket
once it has imported everything, and ends with its standard input. Each connection requests one rank (see `start_rank`),
and receives its exit code; the rank is killed if the connection ends first.

The socket is in Linux's abstract namespace, which leaves no file behind. Only processes of the same user are served.
RUN_DIR is not read: it identifies the process in a list of processes, where ranks have the name `rank NUMBER`.
"""

import ctypes
import json
import logging
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from multihop.common.errors import DONE, FAILED

_LENGTH = struct.Struct("!I")
_CODE = struct.Struct("!i")
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as in unix(7)."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_REQUEST_TIMEOUT_S = 5.0
"""Seconds to wait for a request, which arrives at once unless the requesting process has been stopped."""


class StandbyLost(Exception):
    """The standby process has ended or does not answer."""


class ForkedRank:
    """A rank that was forked from a standby process, with the methods of `subprocess.Popen` that callers need."""

    def __init__(self, connection: socket.socket, stdout: IO[str]) -> None:
        self._connection, self.stdout = connection, stdout
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the rank; returns its exit code, or the negative signal if it was killed.

        Raises:
            subprocess.TimeoutExpired: It has not ended within `timeout` seconds.
        """
        if self._code is None:
            self._connection.settimeout(timeout)
            try:
                answer = self._connection.recv(_CODE.size)
            except TimeoutError:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0) from None
            except OSError:
                answer = b""
            # The kernel kills a rank together with the standby process that it was forked from.
            self._code = _CODE.unpack(answer)[0] if answer else -signal.SIGKILL
        return self._code

    def kill(self) -> None:
        """Kill the rank; `wait` returns when it has ended."""
        if self._code is None:
            self._connection.shutdown(socket.SHUT_WR)


def start_rank(name: str, run_dir: str, environment: Mapping[str, str]) -> ForkedRank:
    """Make a standby process of this node fork a rank of the run in `run_dir`, with the given environment, and this
    process's working directory and standard error.

    Raises:
        StandbyLost: It cannot be reached.
    """
    request = json.dumps({"run_dir": run_dir, "folder": os.getcwd(), "environment": dict(environment)}).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    read_end, write_end = os.pipe()
    try:
        connection.settimeout(_REQUEST_TIMEOUT_S)
        connection.connect(f"\0{name}")
        _check_same_user(connection)  # another user may have taken the name of one that has ended
        socket.send_fds(connection, [_LENGTH.pack(len(request))], [write_end, 2])
        connection.sendall(request)
    except OSError as error:
        connection.close()
        os.close(read_end)
        raise StandbyLost(str(error)) from None
    finally:
        os.close(write_end)
    return ForkedRank(connection, os.fdopen(read_end))


def main() -> int:
    """The command `python -m multihop.pretrain.run.standby RUN_DIR`."""
    # Devices are counted by NVML, because an initialized CUDA driver does not survive a fork. Ray hides devices from a
    # process that reserves none, and DeepSpeed would then choose the CPU.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    console = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed prints to standard output
    import torch

    from multihop.pretrain.engine.deepspeed_internals import import_deepspeed
    from multihop.pretrain.run import worker

    import_deepspeed()
    if torch.cuda.is_initialized():
        print("an import has initialized CUDA, so this process cannot be forked", file=sys.stderr)
        return FAILED
    name = f"multihop-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        print(name, file=console, flush=True)
        connection = _next_request(listener)
    if connection is None:
        return DONE
    request = _watch_rank(connection)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _prctl(_PR_SET_NAME, f"rank {os.environ['RANK']}".encode())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # OpenMP read the variable when it was loaded
    sys.argv = [worker.__name__, request["run_dir"]]
    return worker.main()


def _next_request(listener: socket.socket) -> socket.socket | None:
    """Wait for a request; returns its connection, in a process forked for it, or None at the end of standard input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for them
    while True:
        readable, _, _ = select.select([0, listener.fileno()], [], [])
        if 0 in readable:
            return None
        connection, _ = listener.accept()
        standby = os.getpid()
        if os.fork() == 0:
            _die_with_parent(standby)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return connection
        connection.close()


def _watch_rank(connection: socket.socket) -> dict[str, Any]:
    """Fork a rank, in which this function returns the request; this process watches it, and exits when it has ended."""
    _check_same_user(connection)
    connection.settimeout(_REQUEST_TIMEOUT_S)
    length, (stdout, stderr), _, _ = socket.recv_fds(connection, _LENGTH.size, 2)
    with connection.makefile("rb") as stream:
        request: dict[str, Any] = json.loads(stream.read(_LENGTH.unpack(length)[0]))
    watcher, rank = os.getpid(), os.fork()
    if rank == 0:
        _die_with_parent(watcher)
        connection.close()
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
            os.dup2(file, number)
            os.close(file)
        return request
    os.close(stdout)
    os.close(stderr)
    ended = os.pidfd_open(rank)
    readable, _, _ = select.select([ended, connection.fileno()], [], [])
    if ended not in readable:  # the connection has ended
        os.kill(rank, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    with suppress(BrokenPipeError):
        connection.sendall(_CODE.pack(code))
    os._exit(DONE)


def _check_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise ConnectionRefusedError(f"the process at the other end is user {user}, this one {os.getuid()}")


def _die_with_parent(parent: int) -> None:
    """Make Linux kill this process when its parent ends for any reason."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(FAILED)


def _prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, argument)


if __name__ == "__main__":
    # Not sys.exit, as in multihop.pretrain.run.worker.
    code = main()
    logging.shutdown()
    os._exit(code)
