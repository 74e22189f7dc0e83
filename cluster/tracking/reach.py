"""Whether an MLflow server answers."""

import os
import time

from multihop.cluster.tracking.store import connect
from multihop.cluster.tracking.timeout import call_with_timeout
from multihop.common.redaction import redacted


def server_uri(given: str | None) -> str | None:
    """The server or database that runs are tracked by; None: SQLite in the folder of the runs."""
    uri = given or os.environ.get("MLFLOW_TRACKING_URI")
    return None if uri is None or uri.startswith("sqlite:") else uri


def seconds_to_answer(uri: str) -> float:
    """How long a server takes to list an experiment.

    Raises:
        ConnectionError: it does not answer, or refuses.
    """
    from mlflow.exceptions import MlflowException

    started = time.perf_counter()
    try:
        call_with_timeout(lambda: connect(uri).search_experiments(max_results=1))
    except (MlflowException, TimeoutError) as error:
        raise ConnectionError(f"{redacted(uri)}: {redacted(str(error).splitlines()[0])[:300]}") from None
    return time.perf_counter() - started
