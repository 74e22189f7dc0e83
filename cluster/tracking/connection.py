"""The connection to MLflow: the store, a client of it, timeouts, and a check of the credentials.

Requests to a server time out by themselves, unless it sends a byte now and then. Requests to a database or an artifact
store, and MLflow's attempts to connect to a database, may not: `call_with_timeout` abandons them.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from multihop.common.errors import UserError
from multihop.common.redaction import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

_Result = TypeVar("_Result")
TIMEOUT_S = 60.0
"""Longest time that a command waits for MLflow."""
STORE_FILES = ("mlflow.db", "mlartifacts")
"""Prefixes of the local store's file names in the runs directory, locks and journals included."""
_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")
_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
# Callers continue without MLflow and retry later, so requests should fail fast.
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "GIT_PYTHON_REFRESH": "quiet",
}


def store_uri(runs: Path, configured: str | None = None) -> str:
    """Return the tracking URI: `configured`, else MLFLOW_TRACKING_URI, else an SQLite file in the runs directory.

    Raises:
        UserError: MLflow does not support the URI.
    """
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{os.path.realpath(runs)}/mlflow.db"
    if urlsplit(uri).scheme.partition("+")[0] not in _SCHEMES and uri != "databricks":
        raise UserError(
            f"tracking.uri={redacted(uri)} is not a tracking server or database; write http://HOST:PORT or "
            "sqlite:///PATH, or omit it for SQLite in the runs directory"
        )
    return uri


def connect(uri: str) -> "MlflowClient":
    """Return a client of the store. A missing SQLite store is created first, which takes MLflow some seconds."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    database = _sqlite_path(uri)
    if database is not None:
        _create_sqlite(database)
    return MlflowClient(tracking_uri=uri)


class _Call(threading.Thread):
    """A thread that runs `call_with_timeout`'s call."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__(target=call, daemon=True, name="mlflow")
        self.answered_at = time.monotonic()


def call_with_timeout(call: Callable[[], _Result]) -> _Result:
    """Run `call` in a thread, and return or raise what it does. A thread that does not end in time is abandoned.

    A call of many requests, which notes each answer (`note_answer`), may take as long as they do: what a long run lacks
    in MLflow takes minutes.

    Raises:
        TimeoutError: the call did not end within `TIMEOUT_S` seconds, nor within as many after an answer.
    """
    results: list[_Result] = []
    errors: list[Exception] = []

    def attempt() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    thread = _Call(attempt)
    thread.start()
    while thread.is_alive() and (left := thread.answered_at + TIMEOUT_S - time.monotonic()) > 0:
        thread.join(left)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"no answer within {TIMEOUT_S:.0f} seconds")
    return results[0]


def note_answer() -> None:
    """Start the time limit of the present `call_with_timeout` again: MLflow has answered one of its requests."""
    thread = threading.current_thread()
    if isinstance(thread, _Call):
        thread.answered_at = time.monotonic()


def check_access(uri: str) -> None:
    """Check a server's answer to the user's credentials, before anything that takes long.

    Raises:
        UserError: the server refuses the user. An unreachable server is no error, and databases are not checked.
    """
    if not uri.startswith(("http://", "https://")):
        return
    client = connect(uri)
    try:
        call_with_timeout(lambda: client.search_experiments(max_results=1))
    except Exception as error:  # another failure is no reason to refuse a run
        if reason := refusal(error):
            raise UserError(f"{redacted(uri)} {reason}") from None


def refusal(error: Exception) -> str:
    """Return the predicate of a sentence about a store that refuses the user; empty if `error` is another one."""
    code = getattr(error, "error_code", "")
    if code == "UNAUTHENTICATED":
        return f"refuses the user name and password; set {_CREDENTIALS} to a user of that server"
    if code == "PERMISSION_DENIED":
        return (
            f"does not let this user write; ask its administrator for the permission EDIT on the experiment, set "
            f"tracking.experiment to one of your own, or set {_CREDENTIALS} to another user"
        )
    if "password authentication failed" in str(error):
        return "refuses the database's password; set PGPASSWORD, ~/.pgpass or MLFLOW_TRACKING_URI"
    return ""


def server_uri(configured: str | None) -> str | None:
    """Return the URI of the server or database that tracks runs; None: SQLite in the folder of the runs."""
    uri = configured or os.environ.get("MLFLOW_TRACKING_URI")
    return None if uri is None or uri.startswith("sqlite:") else uri


def seconds_to_answer(uri: str) -> float:
    """Return the seconds that a server takes to list an experiment.

    Raises:
        ConnectionError: the server does not answer, or refuses the request.
    """
    from mlflow.exceptions import MlflowException

    started = time.perf_counter()
    try:
        call_with_timeout(lambda: connect(uri).search_experiments(max_results=1))
    except (MlflowException, TimeoutError) as error:
        raise ConnectionError(f"{redacted(uri)}: {redacted(str(error).splitlines()[0])[:300]}") from None
    return time.perf_counter() - started


def artifact_location(uri: str) -> str | None:
    """Return the URI of the artifacts of a local SQLite store, beside its file; None: the server decides."""
    database = _sqlite_path(uri)
    return (database.parent / "mlartifacts").as_uri() if database is not None else None


def _sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def _create_sqlite(database: Path) -> None:
    """Create the database under a temporary name: a store killed during MLflow's migrations is unusable."""
    from filelock import FileLock

    if database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):
        if database.exists():
            return
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        unfinished = database.with_name(database.name + ".new")
        unfinished.unlink(missing_ok=True)
        store = SqlAlchemyStore(f"sqlite:///{unfinished}", (database.parent / "mlartifacts").as_uri())
        store.engine.dispose()
        os.replace(unfinished, database)
