"""Reading a file of JSON rows while another process appends to it."""

import logging
from collections.abc import Iterator
from pathlib import Path

from data_prep.files import end_of_lines, open_regular
from data_prep.rows import Row, parse_row

log = logging.getLogger(__name__)


class RowFollower:
    """Gives each row once, as soon as its line is whole; all of them again where rows were cut off under it."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path, self._offset = path, 0
        if from_end and path.exists():
            with open_regular(path) as file:
                self._offset = end_of_lines(file)

    def read(self) -> Iterator[Row]:
        """The rows that came since the last one that was taken."""
        try:
            file = open_regular(self._path)
        except FileNotFoundError:
            return
        with file:
            # The offset is behind a whole line. A torn one that a restart cuts off is never passed, but after a power
            # cut rows may be missing that were read before.
            file.seek(max(0, self._offset - 1))
            if self._offset and file.read(1) != b"\n":
                self._offset = file.seek(0)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = parse_row(line)
                if row is None:
                    log.warning(
                        "%s: the line that ends at byte %d is no row and is passed over", self._path, self._offset
                    )
                else:
                    yield row
