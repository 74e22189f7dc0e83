"""Files of JSON rows that are only ever appended to: results, starts, changes."""

import json
import os
from pathlib import Path
from typing import Any

from data_prep.files import cut_torn_line

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows, oldest first; none when there is no file.

    A row counts once its line is ended: what a crash left of a last line is passed over.

    Raises:
        ValueError: a whole line is not a JSON object.
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object; delete that line and run again")
        rows.append(row)
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add a row and sync it to the disk; what a crash left of a last line is cut off first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    cut_torn_line(path)
    with open(path, "ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
