"""Reading a file of JSON rows while another process appends to it."""

import json
from pathlib import Path
from typing import Any


class RowFollower:
    """Gives each row once, as soon as its line is whole."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[dict[str, Any]]:
        """The rows that came since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)  # always behind a whole line: a torn one that a restart cuts off is never passed
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines() if line]
