"""Trials that are logged beside the run's driver, which is the only writer of all else in its MLflow run."""

import logging
from collections.abc import Sequence
from pathlib import Path

from multihop.cluster.tracking.store import connect, log_trial, nested_runs, store_uri
from multihop.cluster.tracking.tracker import read_state
from multihop.common.json_lines import Row
from multihop.common.redaction import redacted

log = logging.getLogger(__name__)


def log_concurrently(run_dir: Path, uri: str | None, rows: Sequence[Row]) -> bool:
    """Log rows of results.jsonl as runs nested under the MLflow run that the driver keeps; a key is logged only once.

    The caller holds the run's evaluation lock. What is not logged here is logged by the next command that evaluates.

    Args:
        uri: the recipe's tracking.uri.

    Returns:
        Whether MLflow has all of them; False if it is unreachable (with a warning), or the driver has no run there yet.
    """
    where = store_uri(run_dir.parent, uri)
    try:
        state = read_state(run_dir)
        if not state.get("run_id") or state["uri"] != redacted(where):
            return False
        client = connect(where)
        parent = client.get_run(state["run_id"]).info
        finished, begun = nested_runs(client, parent.experiment_id, parent.run_id)
        for row in rows:
            if row["key"] not in finished:
                log_trial(client, parent.experiment_id, parent.run_id, row, begun.get(row["key"]))
                finished.add(row["key"])
    except Exception as error:  # no failure of MLflow may end the evaluation
        reason = " ".join(redacted(str(error)).split())[:300]
        log.warning("MLflow at %s lacks trials of this run, which are logged later (%s)", redacted(where), reason)
        return False
    return True
