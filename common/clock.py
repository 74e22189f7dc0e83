"""The clock by which code waits for other processes; a simulation of several processes replaces these functions."""

import threading
import time


def monotonic() -> float:
    """Return seconds that pass while the machine is awake; only differences have a meaning."""
    return time.monotonic()


def boottime() -> float:
    """Return seconds that also pass while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def sleep(seconds: float) -> None:
    """Wait for a number of seconds."""
    time.sleep(seconds)


def wait(event: threading.Event, seconds: float) -> bool:
    """Wait until an event is set, but not for longer than a number of seconds; returns whether it is set."""
    return event.wait(seconds)
