"""Reads the predictions of a trial, eval/predictions/KEY.json beside eval/results.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.common.files import read_json_object, sha256_file
from multihop.common.json_lines import Row

RunRow = tuple[Path, Row]
"""A run directory and a row of its results.jsonl."""
_MOST_BYTES = 256 * 2**20


def read_predictions(run_dir: Path, row: Row) -> dict[str, Any] | None:
    """Read the file of a row's trial, with `statistics`, `targets`, `predicted` and `errors`; None if there is none.

    Raises:
        UserError: the file is damaged.
    """
    key = str(row.get("key"))
    if not key.isalnum():  # a path could lead anywhere
        return None
    path, advice = run_dir / "eval" / "predictions" / f"{key}.json", "delete it: seeds are then judged alone"
    try:
        content = read_json_object(path, advice=advice, max_bytes=_MOST_BYTES)
    except FileNotFoundError:
        return None
    if row.get("predictions_sha256") not in (None, sha256_file(path)):
        raise UserError(f"{path} is damaged: its SHA-256 is not its row's; {advice}")
    return content


def read_statistics(*sides: Sequence[RunRow]) -> list[NDArray[np.float64]] | None:
    """Read the statistics per example of the trials of several sides, whose examples can be resampled together.

    Args:
        sides: trials of one task.

    Returns:
        float64 (trials, N, k) of each side; None unless every trial has a file, and all have the same targets.

    Raises:
        UserError: a file is damaged.
    """
    of_sides: list[NDArray[np.float64]] = []
    targets: list[Any] = []
    for trials in sides:
        tables = []
        for run_dir, row in trials:
            content = read_predictions(run_dir, row)
            if content is None:
                return None
            targets.append(content.get("targets"))
            tables.append(_table(content.get("statistics"), run_dir, row))
        if any(other != targets[0] for other in targets) or len({table.shape for table in tables}) != 1:
            return None
        of_sides.append(np.stack(tables))
    return of_sides if len({tables.shape[1:] for tables in of_sides}) == 1 else None


def _table(content: Any, run_dir: Path, row: Row) -> NDArray[np.float64]:
    try:
        table = np.array(content, np.float64)
    except (TypeError, ValueError):
        table = np.empty(0)
    if table.ndim != 2 or not table.size or not np.isfinite(table).all():
        raise UserError(
            f"{run_dir}/eval/predictions/{row['key']}.json: statistics is not a table of numbers with a line for each "
            "example; delete the file: seeds are then judged alone"
        )
    return table
