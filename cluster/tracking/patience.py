"""Calls to MLflow that are waited for only so long.

Requests to a server time out by themselves, unless a byte comes now and then; those to a database or to a store of
artifacts, and MLflow's attempts to connect to a database, need not.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")
PATIENCE_S = 60.0
"""So long at most a command waits for MLflow."""


def patiently(call: Callable[[], _Result]) -> _Result:
    """What `call` returns or raises, from a thread of its own, which is left behind if it does not end in time.

    Raises:
        TimeoutError: it did not.
    """
    results: list[_Result] = []
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=attempt, daemon=True, name="mlflow")
    thread.start()
    thread.join(PATIENCE_S)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"no answer within {PATIENCE_S:.0f} seconds")
    return results[0]
