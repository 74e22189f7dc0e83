"""Fetches the files of a tracked run from MLflow, for machines without its directory."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from multihop.cluster.tracking.connection import connect, refusal
from multihop.cluster.tracking.store import TOKEN_TAG
from multihop.common.errors import UserError
from multihop.common.redaction import redacted, safe_text

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

COMPARED = ("recipe.json", "summary.json", "eval/plan.json", "eval/results.jsonl")
"""Files that comparisons read besides metrics.jsonl; they are logged as artifacts without their directories."""


def fetch_run(name: str, uri: str, folder: Path) -> Path:
    """Write what MLflow has of the run `name` into `folder / name`, which it returns.

    These are COMPARED, of which only recipe.json must exist, and metrics.jsonl with the metrics that are logged.

    Raises:
        UserError: MLflow has no such run, several, or one without recipe.json; it is unreachable, or refuses the user.
    """
    from mlflow.exceptions import MlflowException

    try:
        client = connect(uri)
        run = _find(client, name, uri)
        return _write(client, run, folder / name)
    except MlflowException as error:
        reason = refusal(error) or f"gives no answer ({' '.join(redacted(str(error)).split())[:300]})"
        raise UserError(f"{redacted(uri)} {reason}") from None


def _find(client: "MlflowClient", name: str, uri: str) -> "Run":
    """Return the run of this name in any experiment, not one of its trials."""
    experiments = {each.experiment_id: each.name for each in client.search_experiments()}
    plain = Path(name).name == name and not {"'", '"'} & set(name)
    wanted = f"attributes.run_name = '{name}' and tags.`{TOKEN_TAG}` LIKE '%'"
    runs = client.search_runs(list(experiments), wanted) if plain and experiments else []
    if not runs:
        raise UserError(f"no run {safe_text(name)} in MLflow at {redacted(uri)}; check the name in its UI")
    if len(runs) > 1:
        locations = ", ".join(f"{experiments[run.info.experiment_id]} ({run.info.run_id})" for run in runs)
        raise UserError(
            f"{len(runs)} runs are called {safe_text(name)} in MLflow at {redacted(uri)}, in experiments "
            f"{safe_text(locations)}; delete or rename all but one of them"
        )
    return runs[0]


def _write(client: "MlflowClient", run: "Run", run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    run_id = run.info.run_id
    logged = {file.path for file in client.list_artifacts(run_id)}
    if "recipe.json" not in logged:
        raise UserError(
            f"MLflow has no recipe.json of the run {run_dir.name}, which an older version logged or which is still "
            "starting; compare it where its directory is"
        )
    for file in map(Path, COMPARED):
        if file.name in logged:
            (run_dir / file).parent.mkdir(exist_ok=True)
            shutil.move(client.download_artifacts(run_id, file.name), run_dir / file)
    rows: dict[int, dict[str, float]] = {}
    for metric in run.data.metrics:
        for point in client.get_metric_history(run_id, metric):
            row = rows.setdefault(point.step, {"step": point.step, "time": point.timestamp / 1000})
            row.setdefault(point.key, point.value)
    lines = [json.dumps(rows[step]) + "\n" for step in sorted(rows)]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return run_dir
