"""Files of rows that grow on one node and are read on another, through an object store.

What was appended is written as numbered objects, in order, by a thread; each object holds whole lines and is never
changed. Nothing is lost with the reader: whoever reads first appends them to files of its own again.
"""

import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multihop.common.errors import UserError
from multihop.common.files import add_path_to_disk_full_error, last_line_end, open_append, open_regular
from multihop.common.storage import Folder

_EVERY_S = 1.0
_MERGED = 1000
"""Parts that are replaced by one: a listing of a store has as many names."""
_NAME = re.compile(r"(?P<start>\d{8,})-(?P<first>\d{8,})(_(?P<last>\d{8,}))?\.(?P<file>[a-z]+\.jsonl)")

log = logging.getLogger(__name__)


class JournalWriter:
    """Passes on what is appended to files of a folder from now on."""

    def __init__(self, place: Folder, start: int, folder: Path, names: Sequence[str]) -> None:
        """Start the thread.

        Args:
            start: number of this start of the writer; larger than that of any before it.
            names: of the files, which need not exist.
        """
        self._place, self._start, self._folder = place, start, folder
        self._offsets = {name: _end(folder / name) for name in names}
        self._number = 0
        self._unanswered: tuple[_Part, int] | None = None
        """A part whose write failed, and its end offset. It may be in the store, and a reader may have read it: it is
        written again unchanged."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="journal")
        self._thread.start()

    def flush(self) -> None:
        """Write all complete lines that are not written yet.

        Raises:
            OSError: the store cannot be written to; they are written with the next flush.
        """
        with self._lock:
            if self._unanswered:
                self._write(*self._unanswered)
            for name, offset in self._offsets.items():
                end = _end(self._folder / name)
                if end > offset:
                    self._write(_Part(self._start, self._number, self._number, name), end)

    def _write(self, part: "_Part", end: int) -> None:
        offset = self._offsets[part.file]
        with open_regular(self._folder / part.file) as file:
            file.seek(offset)
            data = file.read(end - offset)
        self._unanswered = part, end
        self._place.write_atomically(part.name, data)
        self._unanswered = None
        self._number, self._offsets[part.file] = part.first + 1, end

    def close(self) -> None:
        """Flush for the last time, and end the thread; raises as `flush`."""
        self._ended.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        told = False
        while not self._ended.wait(_EVERY_S):
            try:
                self.flush()
                told = False
            except OSError as error:
                if not told:
                    log.warning("%s: rows could not be written (%s); trying again", self._place.location, error)
                told = True


class JournalReader:
    """Appends what writers passed on to files of its own, each row once. Only one at a time may read a place."""

    def __init__(self, place: Folder, folder: Path, names: Sequence[str]) -> None:
        """The files are removed: they are made of the journal alone."""
        self._place, self._folder = place, folder
        self._seen: set[str] = set()
        self._parts: dict[tuple[int, str], list[_Part]] = defaultdict(list)
        for name in names:
            (folder / name).unlink(missing_ok=True)

    def read(self) -> None:
        """Append what is new. Where there are many parts of a writer, they are replaced by one.

        Raises:
            OSError: the store cannot be read; nothing is lost, it is read with the next call.
        """
        names = {name: _Part.of(name) for name in self._place.names()}
        merged = [part for part in names.values() if part.last > part.first]
        for name, part in sorted(names.items(), key=lambda item: item[1]):
            if any(other is not part and other.covers(part) for other in merged):
                self._place.remove(name)  # left by a reader that was killed
            elif name not in self._seen:
                data = self._place.read_bytes(name, 2**30)
                path = self._folder / part.file
                with add_path_to_disk_full_error(path), open_append(path) as file:
                    part.offset, part.length = file.tell(), len(data)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                self._seen.add(name)
                if part.last == part.first:
                    self._parts[part.start, part.file].append(part)
        for parts in self._parts.values():
            if len(parts) >= _MERGED:
                self._merge(parts)

    def newest_start(self) -> int:
        """The number of the newest start of a writer; 0: none has written."""
        return max((_Part.of(name).start for name in self._place.names()), default=0)

    def _merge(self, parts: "list[_Part]") -> None:
        whole = _Part(parts[0].start, parts[0].first, parts[-1].last, parts[0].file)
        with open_regular(self._folder / whole.file) as file:
            chunks = []
            for part in parts:
                file.seek(part.offset)
                chunks.append(file.read(part.length))
        self._seen.add(whole.name)  # before it is written: its rows were read already, even if the response is lost
        self._place.write_atomically(whole.name, b"".join(chunks))
        for part in parts:
            self._place.remove(part.name)
        parts.clear()


@dataclass(order=True)
class _Part:
    """An object with rows of one file: what a writer wrote at once, or many of these."""

    start: int
    first: int
    last: int
    file: str
    offset: int = field(default=0, compare=False)
    """Where its rows are in the reader's file,"""
    length: int = field(default=0, compare=False)
    """and how many bytes they have."""

    @property
    def name(self) -> str:
        numbers = f"{self.first:08d}" if self.first == self.last else f"{self.first:08d}_{self.last:08d}"
        return f"{self.start:08d}-{numbers}.{self.file}"

    @classmethod
    def of(cls, name: str) -> "_Part":
        found = _NAME.fullmatch(name)
        if found is None:
            raise UserError(f"{name} is not a part of a journal; remove it from the run's folder `journal`")
        first = int(found["first"])
        return cls(int(found["start"]), first, int(found["last"] or first), found["file"])

    def covers(self, other: "_Part") -> bool:
        same = (self.start, self.file) == (other.start, other.file)
        return same and self.first <= other.first and other.last <= self.last


def _end(path: Path) -> int:
    if not path.exists():
        return 0
    with open_regular(path) as file:
        return last_line_end(file)
