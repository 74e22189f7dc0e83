"""Files of predictions are compared example by example only if they are of the same examples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multihop.common.errors import UserError
from multihop.eval.statistics.read_predictions import read_predictions, read_statistics
from multihop.eval.trials.write_predictions import write_predictions


def write(run_dir: Path, key: str, content: Any) -> dict[str, Any]:
    folder = run_dir / "eval" / "predictions"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{key}.json").write_text(json.dumps(content))
    return {"key": key}


def test_tables_of_both_sides(tmp_path: Path) -> None:
    rows = [write(tmp_path, f"a{n}", {"statistics": [[n, 1], [0, 1]], "targets": [0, 1]}) for n in range(3)]
    result = read_statistics(*([(tmp_path, row) for row in side] for side in (rows[:1], rows[1:])))
    assert result is not None and [tables.shape for tables in result] == [(1, 2, 2), (2, 2, 2)]
    assert np.array_equal(result[1][1], [[2, 1], [0, 1]])


@pytest.mark.parametrize(
    "other", [{"statistics": [[1, 1], [0, 1]], "targets": [1, 1]}, {"statistics": [[1, 1]], "targets": [0, 1]}]
)
def test_other_examples_and_missing_files_are_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    one = write(tmp_path, "a", {"statistics": [[1, 1], [0, 1]], "targets": [0, 1]})
    assert read_statistics([(tmp_path, one)], [(tmp_path, write(tmp_path, "b", other))]) is None
    assert read_statistics([(tmp_path, one), (tmp_path, {"key": "c"})], [(tmp_path, one)]) is None
    assert read_predictions(tmp_path, {"key": "../../recipe"}) is None


@pytest.mark.parametrize("table", [[], [1, 2], [[1, "x"]], [[1], [1, 2]], None, [[1, None]]])
def test_a_damaged_table_is_named(tmp_path: Path, table: Any) -> None:
    row = write(tmp_path, "a", {"statistics": table, "targets": []})
    with pytest.raises(UserError, match=r"predictions/a\.json: statistics is not a table of numbers"):
        read_statistics([(tmp_path, row)], [(tmp_path, row)])


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    sha256 = write_predictions(tmp_path / "eval" / "predictions", "a", {"statistics": [[1.0, 1.0], [0.0, 1.0]]})
    row, path = {"key": "a", "predictions_sha256": sha256}, tmp_path / "eval" / "predictions" / "a.json"
    assert read_predictions(tmp_path, row) == json.loads(path.read_text())
    path.write_text(path.read_text().replace("0.0", "1.0"))
    with pytest.raises(UserError, match=r"a\.json is damaged: its SHA-256 is not its row's; delete it"):
        read_predictions(tmp_path, row)
