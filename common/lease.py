"""One holder at a time of a place in a store, without a lock that a dead process would keep.

The holder of the highest number holds it. Numbers are taken by conditional writes, so that each has one holder; the
holder proves every ten seconds that it lives, and another one takes the next number when it has been silent for a
minute, or has said that it ended. Clocks need not agree: a waiter looks whether the proof changes.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from multihop.common.errors import UserError
from multihop.common.storage import Folder

_BEAT_S = 10.0
_SILENT_S = 60.0
_POLL_S = 2.0
_ENDED = "ended"

log = logging.getLogger(__name__)


class HeldError(UserError):
    """Another process holds the place, and lives."""


@contextmanager
def leased(place: Folder, lost: Callable[[], object]) -> Iterator[None]:
    """Hold `place` for the length of a block; waits up to a minute to see whether the holder lives.

    Args:
        lost: called from a thread when another process has taken the place, because this one could not prove for a
            minute that it lives: nothing may be written any more.

    Raises:
        HeldError: a living process holds it.
        UserError: the store does not support conditional writes.
    """
    number = _take(place)
    ended = threading.Event()
    thread = threading.Thread(target=_beat, args=(place, number, ended, lost), daemon=True, name="lease")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        try:
            place.write_atomically(_proof(number), _ENDED.encode())
        except OSError as error:  # the work is complete; the next holder only waits for a minute
            log.warning(
                "%s: could not release the lease (%s); the next holder waits until it expires", place.location, error
            )


def _take(place: Folder) -> int:
    content = json.dumps({"holder": f"process {os.getpid()} on {socket.gethostname()}", "id": secrets.token_hex(8)})
    while True:
        newest = max(_numbers(place), default=0)
        if newest:
            _wait_until_silent(place, newest)
        name = f"{newest + 1:08d}"
        # An answer that was lost looks like another holder: the content tells.
        if place.create(name, content.encode(), secrets.token_hex(4)) or place.read_bytes(name) == content.encode():
            for old in range(max(1, newest - 10), newest):
                place.remove(f"{old:08d}")
                place.remove(_proof(old))
            return newest + 1


def _wait_until_silent(place: Folder, number: int) -> None:
    """Returns when the holder of a number has ended, or been silent for a minute.

    Raises:
        HeldError: it lives.
    """
    first = _read(place, _proof(number))
    deadline = time.monotonic() + _SILENT_S
    while first != _ENDED and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = _read(place, _proof(number))
        if now == _ENDED:
            return
        if now != first:
            holder = json.loads(_read(place, f"{number:08d}") or "{}").get("holder", "another process")
            raise HeldError(f"{place.location} is in use by {holder}; wait for that process to end, or stop it")


def _beat(place: Folder, number: int, ended: threading.Event, lost: Callable[[], object]) -> None:
    count = 0
    while True:
        try:
            place.write_atomically(_proof(number), f"{count}".encode())
            if max(_numbers(place), default=number) > number:
                lost()
                return
        except OSError as error:  # the proof is late; whoever takes the place meanwhile is seen afterwards
            log.warning("%s: could not prove that this process lives (%s)", place.location, error)
        count += 1
        if ended.wait(_BEAT_S):
            return


def _numbers(place: Folder) -> list[int]:
    return [int(name) for name in place.names() if name.isdigit()]


def _proof(number: int) -> str:
    return f"{number:08d}.lives"


def _read(place: Folder, name: str) -> str:
    try:
        return place.read_bytes(name).decode(errors="replace")
    except FileNotFoundError:
        return ""
