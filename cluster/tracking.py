"""One MLflow run per multihop run. The driver is its only writer, and training does not notice when MLflow is away.

The ranks write RUN_DIR/metrics.jsonl; a thread of the driver follows that file. RUN_DIR/tracking.json says which run
of which store it is; what that run has, of each metric the steps, MLflow is asked at each start and after each failure.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.mlflow_store import (
    PARENT_TAG,
    TOKEN_TAG,
    TRIAL_TAG,
    connect,
    experiment_id,
    is_number,
    log_params,
    log_points,
    log_tags,
    log_trial,
    metric_name,
    point,
    search,
    steps_of,
    store_uri,
)
from cluster.rows import RowFollower
from data_prep.files import read_json_object, write_atomically
from data_prep.shown import redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

log = logging.getLogger(__name__)

STATUS = {"done": "FINISHED", "trained": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""MLflow's word for how a run ended."""
_POLL_S = 2.0
_LONGEST_WAIT_S = 60.0
_POINTS_AT_ONCE = 900


def open_run(
    run_dir: Path, recipe: dict[str, Any], uri: str | None, experiment: str, tags: dict[str, str]
) -> "Tracker":
    """The MLflow run of a run directory: resumed, or made when it is the first start or the store is another one.

    Args:
        uri: the recipe's tracking.uri; None: MLFLOW_TRACKING_URI, else SQLite in the folder of the runs.
        tags: what the results depend on beside the recipe: commit, versions, fingerprints.

    Raises:
        ValueError: no such store is possible, or the experiment was deleted. A server that is away is no error.
    """
    tracker = Tracker(run_dir, recipe, store_uri(run_dir.parent, uri), experiment, tags)
    tracker.begin()
    return tracker


def is_behind(run_dir: Path) -> bool:
    """Whether MLflow has not taken all of a run that was tracked; its next start catches up."""
    try:
        state = _read_state(run_dir)
    except ValueError:
        return True
    return bool(state) and not state["complete"]


@dataclass
class _Taken:
    """What MLflow has of the run; looked up anew after every failure, when a call may have been taken or not."""

    steps: dict[str, set[int]]
    """Of each metric, by MLflow's name of it."""
    finished: set[str]
    """Keys of trials."""
    begun: "dict[str, Run]"
    """Trials by key whose logging was interrupted."""
    rows: RowFollower
    """Of metrics.jsonl; which of them are there is known by `steps` alone, for the file may have been cut meanwhile."""


class Tracker:
    """What MLflow is to be told of one run, from `open_run` to `close`. Nothing raises when MLflow is away."""

    def __init__(self, run_dir: Path, recipe: dict[str, Any], uri: str, experiment: str, tags: dict[str, str]) -> None:
        self.run_id = ""
        """MLflow's id of the run; empty until MLflow has answered."""
        self.error: Exception | None = None
        """Why MLflow could not be told the last time; None when it could."""
        self._run_dir, self._recipe, self._uri, self._experiment, self._tags = run_dir, recipe, uri, experiment, tags
        self._shown_uri = redacted(uri)
        self._lock = threading.Lock()
        self._wait_s, self._not_before = 0.0, 0.0
        self._state: dict[str, Any] = {}
        try:
            self._state = _read_state(run_dir)
        except ValueError as error:
            log.warning("%s", error)
        self._client: MlflowClient | None = None
        self._experiment_id = ""
        self._taken: _Taken | None = None
        self._rows: list[dict[str, Any]] = []
        self._artifacts: list[Path] = []

    def begin(self) -> None:
        """Make or resume MLflow's run, if MLflow is there.

        Raises:
            ValueError: a mistake in the recipe's tracking section.
        """
        with self._lock:
            try:
                self._tell()
            except ValueError:
                raise
            except Exception as error:
                self._put_off(error)

    @contextmanager
    def follow_metrics(self) -> Iterator[None]:
        """Follow metrics.jsonl for the length of a block; at its end MLflow has all of it, unless it is away."""
        stop = threading.Event()

        def follow() -> None:
            while not stop.wait(_POLL_S):
                self._tell_if_due()

        follower = threading.Thread(target=follow, name="mlflow", daemon=True)
        follower.start()
        try:
            yield
        finally:
            stop.set()
            follower.join()
            self._tell_now()

    def log_trials(self, rows: list[dict[str, Any]]) -> None:
        """Rows of results.jsonl as nested runs; one whose key MLflow knows is not logged again."""
        self._rows += rows
        self._tell_if_due()

    def log_artifacts(self, paths: list[Path]) -> None:
        """Files, as far as they are there; what MLflow has of the same name is replaced."""
        self._artifacts += [path for path in paths if path.exists()]
        self._tell_if_due()

    def close(self, status: str) -> None:
        """Tell the rest, and how the run ended: one of STATUS."""
        self._tell_now(STATUS[status])
        if self.error is not None:
            log.warning("MLflow at %s has not taken all of this run; the run's next start catches up", self._shown_uri)

    def _tell_if_due(self) -> None:
        if time.monotonic() >= self._not_before:
            self._tell_now()

    def _tell_now(self, final_status: str | None = None) -> None:
        with self._lock:
            try:
                self._tell(final_status)
            except Exception as error:  # whatever it is, the run is worth more than its records
                self._put_off(error)
                return
            if self.error is not None:
                log.warning("MLflow at %s has caught up", self._shown_uri)
            self.error, self._wait_s, self._not_before = None, 0.0, 0.0

    def _put_off(self, error: Exception) -> None:
        """Try again later, each time twice as much later; say so once."""
        if self.error is None:
            reason = " ".join(redacted(str(error)).split())[:300]
            log.warning("MLflow at %s cannot be told (%s); it is tried again now and then", self._shown_uri, reason)
        self.error, self._taken = error, None
        self._wait_s = min(_LONGEST_WAIT_S, max(_POLL_S, 2 * self._wait_s))
        self._not_before = time.monotonic() + self._wait_s

    def _tell(self, final_status: str | None = None) -> None:
        """Bring MLflow up to what is known here."""
        if self._client is None:
            self._client = connect(self._uri)
        client = self._client
        if not self.run_id:
            self.run_id = self._begin(client)
        if self._taken is None:
            self._taken = self._look_up(client)
        if final_status is not None:
            self._taken.rows = self._follow()  # all of it once more: a cut that went unnoticed loses nothing
        self._tell_metrics(client, self._taken)
        while self._rows:
            row = self._rows[0]
            if row["key"] not in self._taken.finished:
                log_trial(client, self._experiment_id, self.run_id, row, self._taken.begun.get(row["key"]))
                self._taken.finished.add(row["key"])
            self._rows.pop(0)
        while self._artifacts:
            client.log_artifact(self.run_id, str(self._artifacts[0]))
            self._artifacts.pop(0)
        if final_status is not None:
            client.set_terminated(self.run_id, final_status)
            self._note(complete=True)

    def _begin(self, client: "MlflowClient") -> str:
        """Find the run by a token that was noted before the run was made, or make it."""
        where = {"uri": self._shown_uri, "experiment": self._experiment}
        fresh = {**where, "token": uuid.uuid4().hex, "run_id": "", "complete": False}
        # What older versions wrote may hold the password too.
        if {key: redacted(self._state.get(key, "")) for key in where} != where:
            self._note(**fresh)
        self._experiment_id = experiment_id(client, self._uri, self._experiment)
        run = next(search(client, self._experiment_id, TOKEN_TAG, self._state["token"]), None)
        if run is None:
            if self._state["run_id"]:  # the run was deleted in MLflow, or the whole store
                self._note(**fresh)
            tags = {TOKEN_TAG: self._state["token"]}
            run = client.create_run(self._experiment_id, tags=tags, run_name=self._run_dir.name)
        run_id = str(run.info.run_id)
        log_tags(client, run_id, self._tags)
        log_params(client, run_id, self._recipe)
        client.update_run(run_id, status="RUNNING")
        self._note(**where, run_id=run_id, complete=False)
        return run_id

    def _look_up(self, client: "MlflowClient") -> _Taken:
        nested = {run.data.tags[TRIAL_TAG]: run for run in search(client, self._experiment_id, PARENT_TAG, self.run_id)}
        begun = {key: run for key, run in nested.items() if run.info.status == "RUNNING"}
        return _Taken(steps_of(client, self.run_id), set(nested) - set(begun), begun, self._follow())

    def _follow(self) -> RowFollower:
        return RowFollower(self._run_dir / "metrics.jsonl")

    def _tell_metrics(self, client: "MlflowClient", taken: _Taken) -> None:
        points: list[Metric] = []
        for row in taken.rows.read():
            for key, value in _numbers(row).items():
                there = taken.steps.setdefault(metric_name(key), set())
                if row["step"] not in there:  # a restart repeats steps: the first row of a (key, step) wins
                    there.add(row["step"])
                    points.append(point(key, value, row["step"], row.get("time", time.time())))
            if len(points) >= _POINTS_AT_ONCE:
                log_points(client, self.run_id, points)
                points.clear()
        log_points(client, self.run_id, points)

    def _note(self, **changes: Any) -> None:
        self._state |= changes
        write_atomically(self._run_dir / "tracking.json", json.dumps(self._state, indent=1).encode() + b"\n", 0o600)


def _read_state(run_dir: Path) -> dict[str, Any]:
    """Raises ValueError where the file is damaged."""
    advice = "MLflow gets another run, which is told everything from the first row on"
    try:
        state = read_json_object(run_dir / "tracking.json", advice=advice)
    except FileNotFoundError:
        return {}
    kinds = {"uri": str, "experiment": str, "token": str, "run_id": str, "complete": bool}
    if wrong := [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]:
        raise ValueError(f"{run_dir / 'tracking.json'} lacks {', '.join(wrong)}; {advice}")
    return {key: state[key] for key in kinds}


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    if type(row.get("step")) is not int:
        return {}
    return {key: value for key, value in row.items() if key not in ("step", "time") and is_number(value)}
