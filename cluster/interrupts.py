"""Signals that stop a command: each raises KeyboardInterrupt in the main thread.

Python runs a signal's handler in whatever Python code the main thread is in. If that was called by C code which clears
exceptions, such as `PyObject_HasAttr`, the interrupt is lost, and nothing is printed. So loops that run for long check
for it.
"""

import signal

_received: list[int] = []
"""The signals that have interrupted this process."""


def interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt in the main thread at SIGTERM, and at SIGINT unless it is ignored, from now on."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def is_interrupted() -> bool:
    """Whether a signal has interrupted this process."""
    return bool(_received)


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt again if a signal has interrupted this process and the work goes on all the same."""
    if _received:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: object) -> None:
    _received.append(number)
    raise KeyboardInterrupt
