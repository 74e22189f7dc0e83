"""Reads and appends to files of JSON rows: metrics, results, launches, changes.

All readers handle lines that are not rows in the same way. An incomplete last line, which a crash leaves, is ignored,
and removed before the next row is appended. A complete line that is not a JSON object is damage: it is skipped, with a
warning that names the file and the byte. A trial whose row is lost in this way is run again.
"""

import json
import logging
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from multihop.common.files import append_bytes, last_line_end, make_folder, open_regular, truncate_torn_line

Row = dict[str, Any]

log = logging.getLogger(__name__)


def read_rows(path: Path) -> list[Row]:
    """Return the rows, oldest first; empty if there is no file."""
    return list(RowFollower(path).read())


def parse_rows(data: bytes, location: str) -> list[Row]:
    """Return the rows in the bytes of the file at `location`, as `read_rows` does."""
    lines = [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
    ends = accumulate(map(len, lines))
    rows = (_parse(line, location, end) for line, end in zip(lines, ends, strict=True))
    return [row for row in rows if row is not None]


def append_row(path: Path, row: Row) -> None:
    """Append a row atomically and sync it; first removes an incomplete last line.

    Raises:
        ValueError: The row has a number that JSON cannot represent (NaN, infinity).
        UserError: `path` is a link.
    """
    line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    make_folder(path.parent)
    truncate_torn_line(path)
    append_bytes(path, line)


class RowFollower:
    """Yields each row once, as soon as its line is complete; starts over if the file was truncated meanwhile."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path, self._offset = path, 0
        if from_end and path.exists():
            with open_regular(path) as file:
                self._offset = last_line_end(file)

    def read(self) -> Iterator[Row]:
        """Yield the rows since the last one read."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            # The offset is after a complete line. An incomplete line that a restart removes was never read, but after a
            # power cut rows that were read may be missing.
            file.seek(max(0, self._offset - 1))
            if self._offset and file.read(1) != b"\n":
                self._offset = file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = _parse(line, self._path, self._offset)
                if row is not None:
                    yield row


def _parse(line: bytes, location: str | Path, end: int) -> Row | None:
    """The row of a line that ends at a byte of a file; None, and a warning: it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        return row
    log.warning("%s: the line that ends at byte %d is not a JSON object; skipped", location, end)
    return None
