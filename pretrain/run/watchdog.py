"""A rank that makes no progress for too long dumps its stacks and exits."""

import faulthandler
from collections.abc import Callable


def watchdog(timeout_s: float) -> Callable[[], None]:
    """Start a timer, and return a function that resets it; when it expires, the process dumps all stacks and exits.

    The timer is a thread outside of Python, which a deadlock does not stop. One stuck rank makes all others wait, so
    that each rank dumps its own stacks; the launcher restarts them.
    """

    def heartbeat() -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True)

    heartbeat()
    return heartbeat
