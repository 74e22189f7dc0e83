"""Files of JSON rows that are only ever appended to: metrics, results, starts, changes.

A row counts once its line is ended: whoever reads passes over what a crash left of a last line, and whoever appends
cuts it off first. A whole line that is no row is then damage. It is refused by name where results are made of the rows
(`read_rows`), and passed over with a warning by who only watches a run go on (`cluster.rows`).
"""

import json
import os
from pathlib import Path
from typing import Any

from data_prep.files import cut_torn_line, make_folder, naming, open_append, open_regular

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows, oldest first; none when there is no file.

    Raises:
        ValueError: a whole line is not a JSON object.
    """
    try:
        with open_regular(path) as file:
            *lines, _torn = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            raise ValueError(f"{path}, line {number} is not a JSON object; delete that line and run again")
        rows.append(row)
    return rows


def parse_row(line: bytes) -> Row | None:
    """The row of a line; None where it holds anything but a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def append_row(path: Path, row: Row) -> None:
    """Add a row and sync it to the disk, whole or not at all; what a crash left of a last line is cut off first.

    Raises:
        ValueError: the row has a number that JSON does not know, or a link stands at `path`.
    """
    line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    make_folder(path.parent)
    cut_torn_line(path)
    with naming(path), open_append(path) as file:
        before = file.tell()
        try:
            left = memoryview(line)
            while left:  # not through the buffer, which would write its rest once more as the file is closed
                left = left[os.write(file.fileno(), left) :]
            os.fsync(file.fileno())
        except OSError:
            os.truncate(file.fileno(), before)
            raise
