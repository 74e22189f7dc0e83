"""Locks a folder, so that it has one writer at a time, and waits for locks that other processes hold."""

import errno
import fcntl
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from multihop.cluster.console import console
from multihop.common import clock
from multihop.common.errors import UserError
from multihop.common.files import check_not_link, make_folder, open_regular, write_atomically

_Result = TypeVar("_Result")
LOCK, HOLDER = ".lock", ".holder"
"""Files of a locked folder: the lock, and the host and process of its holder."""
_POLL_S = 1.0


class InUseError(UserError):
    """A folder or a run is in use by another process."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for the length of a block, and write the holder's host and process into it for others' messages.

    The lock ends with the process, unless a forked child without exec outlives it.

    Raises:
        InUseError: another process holds the lock.
    """
    holder = folder / HOLDER
    with _try_lock(folder) as is_acquired:
        if not is_acquired:
            raise InUseError(f"{folder} is in use by {_read_holder(holder)}; wait for that process to end, or stop it")
        try:
            write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            holder.unlink(missing_ok=True)


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """Lock a folder once no other process holds it; the folder is created if it does not exist."""
    make_folder(folder)
    with ExitStack() as stack:
        retry_while_in_use(lambda: stack.enter_context(lock_folder(folder)))
        yield


def retry_while_in_use(attempt: Callable[[], _Result]) -> _Result:
    """Return what `attempt` returns, retrying while it raises InUseError."""
    printed = ""
    while True:
        try:
            return attempt()
        except InUseError as error:
            if str(error) != printed:
                printed = str(error)
                console.print(f"waiting   {printed}")
            clock.sleep(_POLL_S)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the folder, by the holder's file: trying the lock could disturb the holder.

    A holder on another host counts as alive; one on this host is looked up among its processes.
    """
    import psutil

    try:
        with open_regular(folder / HOLDER) as file:
            holder = re.fullmatch(r"process (\d{1,9}) on (.+)\n", file.read(200).decode(errors="replace"))
    except OSError:
        return False
    return holder is None or holder[2] != socket.gethostname() or psutil.pid_exists(int(holder[1]))


@contextmanager
def _try_lock(folder: Path) -> Iterator[bool]:
    """Whether the lock was acquired. It is on the folder and on a file in it: removing the file releases nothing."""
    check_not_link(folder / LOCK)
    lock, descriptor = FileLock(folder / LOCK), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _acquire(descriptor, lock)
    finally:
        lock.release()
        os.close(descriptor)


def _acquire(descriptor: int, lock: FileLock) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # NFS locks only what is open for writing, which a folder never is; the lock on the file is enough then.
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _read_holder(holder: Path) -> str:
    try:
        with open_regular(holder) as file:
            text = file.read(200).decode(errors="replace")
    except OSError:
        text = ""
    return "".join(letter for letter in text if letter.isprintable()) or "another process"
