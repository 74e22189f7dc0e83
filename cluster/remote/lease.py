"""A lease on a folder in a store: one holder at a time, without a lock that a dead process would keep.

The holder of the highest number holds the lease. Numbers are taken by conditional writes, so that each has one holder.
The holder renews its heartbeat every ten seconds. Another process takes the next number once the heartbeat has not
changed for a minute, or the holder has released the lease. Clocks need not agree: a waiter compares heartbeats.
"""

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multihop.cluster.locks import InUseError
from multihop.common import clock
from multihop.common.storage import Folder

_BEAT_S = 10.0
_EXPIRY_S = 60.0
_POLL_S = 2.0
_RELEASED = "released"

log = logging.getLogger(__name__)


class Lease:
    """A lease that this process holds."""

    def __init__(self, folder: Folder, number: int, lost: Callable[[], object]) -> None:
        """Start with heartbeat 0, which is not written yet."""
        self._folder, self._number, self._lost = folder, number, lost
        self._count, self._renewed_at = 0, clock.boottime()
        self._lock = threading.Lock()

    def confirm(self) -> None:
        """Make sure that no other process has taken the lease. Call it before writing what a new holder writes too:
        this process may have been suspended for longer than the lease lasts.

        Raises:
            InUseError: another process has taken it.
            OSError: the store does not answer.
        """
        if clock.boottime() - self._renewed_at > _EXPIRY_S / 2:
            self.renew()

    def renew(self) -> None:
        """Write a heartbeat; raises as `confirm`."""
        with self._lock:
            now = clock.boottime()
            self._folder.write_atomically(_heartbeat_name(self._number), f"{self._count}".encode())
            self._count += 1
            if max(_numbers(self._folder), default=self._number) > self._number:
                self._lost()
                raise InUseError(f"another process has taken over {self._folder.location}; wait for it to end")
            self._renewed_at = now


@contextmanager
def hold_lease(folder: Folder, lost: Callable[[], object]) -> Iterator[Lease]:
    """Hold the lease on `folder` for the length of a block; waits up to a minute for a heartbeat of its holder.

    Args:
        lost: called when another process has taken the lease, because this one could not renew its heartbeat for a
            minute: nothing may be written any more. It may be called from another thread.

    Raises:
        InUseError: a living process holds the lease.
        UserError: the store does not support conditional writes.
    """
    number = _take(folder)
    lease = Lease(folder, number, lost)
    ended = threading.Event()
    thread = threading.Thread(target=_renew, args=(lease, folder.location, ended), daemon=True, name="lease")
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        try:
            folder.write_atomically(_heartbeat_name(number), _RELEASED.encode())
        except OSError as error:  # the work is complete; the next holder only waits for a minute
            log.warning(
                "%s: could not release the lease (%s); the next holder waits until it expires", folder.location, error
            )


def _take(folder: Folder) -> int:
    content = json.dumps({"holder": f"process {os.getpid()} on {socket.gethostname()}", "id": secrets.token_hex(8)})
    while True:
        newest = max(_numbers(folder), default=0)
        if newest:
            _wait_for_expiry(folder, newest)
        name = f"{newest + 1:08d}"
        # If the response was lost, this looks like another holder: compare the content.
        if folder.create(name, content.encode(), secrets.token_hex(4)) or folder.read_bytes(name) == content.encode():
            for old in range(max(1, newest - 10), newest):
                folder.remove(f"{old:08d}")
                folder.remove(_heartbeat_name(old))
            return newest + 1


def _wait_for_expiry(folder: Folder, number: int) -> None:
    """Return when the holder of a number has released the lease, or its heartbeat has not changed for a minute.

    Raises:
        InUseError: the heartbeat changes.
    """
    first = _read(folder, _heartbeat_name(number))
    deadline = clock.monotonic() + _EXPIRY_S
    while first != _RELEASED and clock.monotonic() < deadline:
        clock.sleep(_POLL_S)
        now = _read(folder, _heartbeat_name(number))
        if now == _RELEASED:
            return
        if now != first:
            holder = json.loads(_read(folder, f"{number:08d}") or "{}").get("holder", "another process")
            raise InUseError(f"{folder.location} is in use by {holder}; wait for that process to end, or stop it")


def _renew(lease: Lease, location: str, ended: threading.Event) -> None:
    while True:
        try:
            lease.renew()
        except InUseError:
            return
        except OSError as error:  # late; a process that takes the lease meanwhile is noticed afterwards
            log.warning("%s: could not renew the lease (%s)", location, error)
        if clock.wait(ended, _BEAT_S):
            return


def _numbers(folder: Folder) -> list[int]:
    return [int(name) for name in folder.names() if name.isdigit()]


def _heartbeat_name(number: int) -> str:
    return f"{number:08d}.heartbeat"


def _read(folder: Folder, name: str) -> str:
    try:
        return folder.read_bytes(name).decode(errors="replace")
    except FileNotFoundError:
        return ""
