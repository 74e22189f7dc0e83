"""Calls to MLflow with a timeout.

Requests to a server time out by themselves, unless it sends a byte now and then. Requests to a database or an artifact
store, and MLflow's attempts to connect to a database, may not.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")
TIMEOUT_S = 60.0
"""The most seconds that a command waits for MLflow."""


def call_with_timeout(call: Callable[[], _Result]) -> _Result:
    """Run `call` in a thread, and return or raise what it does. A thread that does not end in time is abandoned.

    Raises:
        TimeoutError: The call did not end within `TIMEOUT_S` seconds.
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
    thread.join(TIMEOUT_S)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"no answer within {TIMEOUT_S:.0f} seconds")
    return results[0]
