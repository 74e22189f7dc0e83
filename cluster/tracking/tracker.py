"""One MLflow run per multihop run, written by the driver. Training does not depend on MLflow being reachable.

The ranks write RUN_DIR/metrics.jsonl and launches.jsonl; a thread of the driver follows both. RUN_DIR/tracking.json
names the store and the run. What that run already has is read from MLflow at each start and after each failure.
Trials of checkpoints that are evaluated during training are logged by that process (`log_concurrently`).
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.cluster.tracking.connection import TIMEOUT_S, call_with_timeout, connect, refusal, store_uri
from multihop.cluster.tracking.fetch import COMPARED
from multihop.cluster.tracking.store import (
    LAUNCHES_TAG,
    TOKEN_TAG,
    experiment_id,
    is_number,
    launches_tag,
    log_new_points,
    log_params,
    log_points,
    log_tags,
    log_trial,
    metric_name,
    nested_runs,
    point,
    search,
    steps_of,
    tag_planned,
)
from multihop.common import clock
from multihop.common.errors import UserError
from multihop.common.files import read_json_object, write_atomically
from multihop.common.json_lines import Row, RowFollower, read_rows
from multihop.common.redaction import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

log = logging.getLogger(__name__)

STATUS = {"done": "FINISHED", "trained": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's status for each status of a run."""
_POLL_S = 2.0
_LONGEST_WAIT_S = 60.0
_POINTS_AT_ONCE = 900


def open_run(
    run_dir: Path, recipe: dict[str, Any], uri: str | None, experiment: str, tags: dict[str, str]
) -> "Tracker":
    """Resume the MLflow run of a run directory, or create it at the first start or for a new store.

    Args:
        uri: the recipe's tracking.uri; None: MLFLOW_TRACKING_URI, else SQLite in the runs directory.
        tags: what the results depend on besides the recipe: commit, versions, fingerprints.

    Raises:
        UserError: the URI is not supported, the server refuses the user, or the experiment was deleted. An unreachable
            server is no error.
    """
    tracker = Tracker(run_dir, recipe, store_uri(run_dir.parent, uri), experiment, tags)
    tracker.begin()
    return tracker


def is_behind(run_dir: Path) -> bool:
    """Return whether MLflow lacks part of a tracked run; the run's next start catches up."""
    try:
        state = read_state(run_dir)
    except UserError:
        return True
    return bool(state) and not state["complete"]


@dataclass
class _Logged:
    """The state of the run in MLflow. It is read again after every failure, since the failed call may have
    succeeded."""

    steps: dict[str, set[int]]
    """Logged steps by MLflow's metric name."""
    finished: set[str]
    """Keys of trials that are fully logged."""
    begun: "dict[str, Run]"
    """Runs of partly logged trials, by key."""
    launches: str
    """Value of LAUNCHES_TAG; empty if it is not set."""
    rows: RowFollower
    """New rows of metrics.jsonl. `steps` decides what is logged, because the file may have been truncated meanwhile."""


class Tracker:
    """Logs one run to MLflow, from `open_run` to `close`. No method raises if MLflow is unreachable."""

    def __init__(self, run_dir: Path, recipe: dict[str, Any], uri: str, experiment: str, tags: dict[str, str]) -> None:
        self.run_id = ""
        """MLflow's id of the run; empty until MLflow was reached."""
        self.error: Exception | None = None
        """Reason for which the last attempt failed; None if it succeeded."""
        self._run_dir, self._recipe, self._uri, self._experiment, self._tags = run_dir, recipe, uri, experiment, tags
        self._safe_uri = redacted(uri)
        self._lock = threading.Lock()
        self._wait_s, self._not_before, self._is_lost = 0.0, 0.0, False
        self._state: dict[str, Any] = {}
        try:
            self._state = read_state(run_dir)
        except UserError as error:
            log.warning("%s", error)
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._logged: _Logged | None = None
        self._rows: list[dict[str, Any]] = []
        self._scores: list[tuple[str, int, float]] = []
        self._planned: set[str] | None = None
        self._artifacts = [run_dir / COMPARED[0]]

    def begin(self) -> None:
        """Create or resume MLflow's run, if MLflow is reachable.

        Raises:
            UserError: a mistake in the recipe's tracking section.
        """
        self._try()
        if isinstance(self.error, UserError):
            raise self.error
        if self.error is not None and (reason := refusal(self.error)):
            raise UserError(f"{self._safe_uri} {reason}") from None
        self._warn()

    @contextmanager
    def follow_metrics(self) -> Iterator[None]:
        """Log metrics.jsonl while the block runs. Afterwards MLflow has all of it, unless it is unreachable."""
        stop = threading.Event()

        def log_regularly() -> None:
            while not clock.wait(stop, _POLL_S):
                self._log_if_due()

        follower = threading.Thread(target=log_regularly, name="mlflow", daemon=True)
        follower.start()
        try:
            yield
        finally:
            stop.set()
            follower.join(TIMEOUT_S)
            self._log_now()

    def forget_logged(self) -> None:
        """Read again what MLflow has before anything else is logged, because another process logged trials."""
        with self._lock:
            self._logged = None

    def log_trials(self, rows: list[dict[str, Any]]) -> None:
        """Log rows of results.jsonl as nested runs; a key is logged only once."""
        self._rows += rows
        self._log_if_due()

    def log_scores(self, scores: Iterable[tuple[str, int, float]]) -> None:
        """Log (name, step, value) as metrics of the run. A value that MLflow has already is not logged again."""
        self._scores += scores
        self._log_if_due()

    def tag_planned_trials(self, keys: Iterable[str]) -> None:
        """Tag each logged trial with whether its key is in `keys`, the plan of the last evaluation."""
        self._planned = set(keys)
        self._log_if_due()

    def log_artifacts(self, paths: list[Path]) -> None:
        """Log those files that exist, replacing artifacts of the same name."""
        self._artifacts += paths
        self._log_if_due()

    def close(self, status: str) -> None:
        """Log the rest, what comparisons read, and the final status: a key of STATUS."""
        self._artifacts += [self._run_dir / file for file in COMPARED[1:]]
        self._log_now(STATUS[status])
        if self.error is not None:
            log.warning("MLflow at %s lacks part of this run; the run's next start catches up", self._safe_uri)

    def _log_if_due(self) -> None:
        if clock.monotonic() >= self._not_before:
            self._log_now()

    def _log_now(self, final_status: str | None = None) -> None:
        self._try(final_status)
        self._warn()

    def _try(self, final_status: str | None = None) -> None:
        """Log in a thread, which is abandoned, with the lock, if MLflow does not answer."""
        try:
            if not self._lock.acquire(timeout=TIMEOUT_S):
                raise TimeoutError("an earlier request still has no answer")
            call_with_timeout(lambda: self._attempt(final_status))
        except TimeoutError as error:
            self._retry_later(error)

    def _attempt(self, final_status: str | None) -> None:
        try:
            self._log(final_status)
        except Exception as error:  # no failure of MLflow may end the run
            self._retry_later(error)
        else:
            self.error, self._wait_s, self._not_before = None, 0.0, 0.0
        finally:
            self._lock.release()

    def _retry_later(self, error: Exception) -> None:
        """Retry later, with exponential backoff."""
        self.error, self._logged = error, None
        self._wait_s = min(_LONGEST_WAIT_S, max(_POLL_S, 2 * self._wait_s))
        self._not_before = clock.monotonic() + self._wait_s

    def _warn(self) -> None:
        """Warn once when MLflow is lost, and once when it is back."""
        error = self.error
        if error is not None and not self._is_lost:
            reason = " ".join(redacted(str(error)).split())[:300]
            log.warning("MLflow at %s is unreachable, retrying (%s)", self._safe_uri, reason)
        if error is None and self._is_lost:
            log.warning("MLflow at %s is reachable again and up to date", self._safe_uri)
        self._is_lost = error is not None

    def _log(self, final_status: str | None = None) -> None:
        """Log everything that MLflow does not have yet."""
        if self._client is None:
            self._client = connect(self._uri)
        client = self._client
        if not self.run_id:
            self.run_id = self._begin(client)
        logged = self._logged = self._logged or self._read_logged(client)
        if final_status is not None:
            logged.rows = self._new_follower()  # from the beginning: rows may have moved if the file was truncated
        self._log_metrics(client, logged)
        self._log_launches(client, logged)
        while self._rows:
            row = self._rows[0]
            if row["key"] not in logged.finished:
                log_trial(client, self._experiment_id, self.run_id, row, logged.begun.get(row["key"]))
                logged.finished.add(row["key"])
            self._rows.pop(0)
        if self._scores:
            log_new_points(client, self.run_id, self._scores)
            self._scores.clear()
        if self._planned is not None:
            tag_planned(client, self._experiment_id, self.run_id, self._planned)
            self._planned = None
        if final_status is not None:
            client.set_terminated(self.run_id, final_status)
        while self._artifacts:  # last: the artifact store may be unreachable while MLflow is not
            if self._artifacts[0].exists():
                client.log_artifact(self.run_id, str(self._artifacts[0]))
            self._artifacts.pop(0)
        if final_status is not None:
            self._write_state(complete=True)

    def _begin(self, client: "MlflowClient") -> str:
        """Find the run by a token that was stored before the run was created, or create it."""
        store = {"uri": self._safe_uri, "experiment": self._experiment}
        fresh = {**store, "token": uuid.uuid4().hex, "run_id": "", "complete": False}
        # Older versions may have stored the password too.
        if {key: redacted(self._state.get(key, "")) for key in store} != store:
            self._write_state(**fresh)
        self._experiment_id = experiment_id(client, self._uri, self._experiment)
        run = self._find(client)
        if run is None:
            if self._state["run_id"]:  # the run or the whole store was deleted
                self._write_state(**fresh)
            tags = {TOKEN_TAG: self._state["token"]}
            run = client.create_run(self._experiment_id, tags=tags, run_name=self._run_dir.name)
        run_id = str(run.info.run_id)
        log_tags(client, run_id, self._tags)
        log_params(client, run_id, self._recipe)
        client.update_run(run_id, status="RUNNING")
        self._write_state(**store, run_id=run_id, complete=False)
        return run_id

    def _find(self, client: "MlflowClient") -> "Run | None":
        """Return the run with the token. A request that timed out may have created a second one after all, which has an
        earlier date than the one that was logged to: it is deleted."""
        runs = sorted(
            search(client, self._experiment_id, TOKEN_TAG, self._state["token"]),
            key=lambda run: (run.info.run_id != self._state["run_id"], run.info.start_time),
        )
        for other in runs[1:]:
            client.delete_run(other.info.run_id)
        return runs[0] if runs else None

    def _read_logged(self, client: "MlflowClient") -> _Logged:
        finished, begun = nested_runs(client, self._experiment_id, self.run_id)
        launches = client.get_run(self.run_id).data.tags.get(LAUNCHES_TAG, "")
        return _Logged(steps_of(client, self.run_id), finished, begun, launches, self._new_follower())

    def _new_follower(self) -> RowFollower:
        return RowFollower(self._run_dir / "metrics.jsonl")

    def _log_metrics(self, client: "MlflowClient", logged: _Logged) -> None:
        points: list[Metric] = []
        for row in logged.rows.read():
            for key, value in _metrics_of(row).items():
                steps = logged.steps.setdefault(metric_name(key), set())
                if row["step"] not in steps:  # a restart repeats steps; the first row of a (key, step) counts
                    steps.add(row["step"])
                    points.append(point(key, value, row["step"], row.get("time", time.time())))
            if len(points) >= _POINTS_AT_ONCE:
                log_points(client, self.run_id, points)
                points.clear()
        log_points(client, self.run_id, points)

    def _log_launches(self, client: "MlflowClient", logged: _Logged) -> None:
        launches = launches_tag(read_rows(self._run_dir / "launches.jsonl"))
        if launches != logged.launches:
            client.set_tag(self.run_id, LAUNCHES_TAG, launches)
            logged.launches = launches

    def _write_state(self, **changes: Any) -> None:
        self._state |= changes
        write_atomically(self._run_dir / "tracking.json", json.dumps(self._state, indent=1).encode() + b"\n", 0o600)


def log_concurrently(run_dir: Path, uri: str | None, rows: Sequence[Row]) -> bool:
    """Log rows of results.jsonl as runs nested under the MLflow run that the driver writes; a key is logged once.

    The caller holds the run's evaluation lock. Rows that are not logged are logged by the next command that evaluates.

    Args:
        uri: the recipe's tracking.uri.

    Returns:
        Whether MLflow has all rows; False if it is unreachable (with a warning), or the driver has no run in it yet.
    """
    store = store_uri(run_dir.parent, uri)
    try:
        state = read_state(run_dir)
        if not state.get("run_id") or state["uri"] != redacted(store):
            return False
        client = call_with_timeout(lambda: connect(store))
        parent = call_with_timeout(lambda: client.get_run(state["run_id"])).info
        experiment = parent.experiment_id
        finished, begun = call_with_timeout(lambda: nested_runs(client, experiment, parent.run_id))
        for row in rows:
            if (key := row["key"]) not in finished:
                call_with_timeout(partial(log_trial, client, experiment, parent.run_id, row, begun.get(key)))
                finished.add(key)
    except Exception as error:  # no failure of MLflow may end the evaluation
        reason = " ".join(redacted(str(error)).split())[:300]
        log.warning("MLflow at %s lacks trials of this run, which are logged later (%s)", redacted(store), reason)
        return False
    return True


def tag_run(run_dir: Path, uri: str | None, tag: str, value: str) -> None:
    """Set a tag of the run in MLflow, if it has one; warns if MLflow is unreachable.

    Args:
        uri: the recipe's tracking.uri.
    """
    store = store_uri(run_dir.parent, uri)
    try:
        state = read_state(run_dir)
        if state.get("run_id") and state["uri"] == redacted(store):  # a copied run is another one's in MLflow
            call_with_timeout(lambda: connect(store).set_tag(state["run_id"], tag, value))
    except Exception as error:  # MLflow is told what the files say; they are what counts
        reason = " ".join(redacted(str(error)).split())[:300]
        log.warning("MLflow at %s lacks the tag %s of this run (%s)", redacted(store), tag, reason)


def read_state(run_dir: Path) -> dict[str, Any]:
    """Return the content of tracking.json: uri (redacted), experiment, token, run_id, complete; empty before the first
    start.

    Raises:
        UserError: the file is damaged.
    """
    advice = "a new MLflow run is created, with all rows from the first one"
    try:
        state = read_json_object(run_dir / "tracking.json", advice=advice)
    except FileNotFoundError:
        return {}
    kinds = {"uri": str, "experiment": str, "token": str, "run_id": str, "complete": bool}
    if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
        raise UserError(f"{run_dir / 'tracking.json'}: {', '.join(wrong)} missing or of the wrong type; {advice}")
    return {key: state[key] for key in kinds}


def _metrics_of(row: dict[str, Any]) -> dict[str, float]:
    if type(row.get("step")) is not int:
        return {}
    return {key: value for key, value in row.items() if key not in ("step", "time") and is_number(value)}
