"""Files of rows that grow on one node and are read on another, through an object store.

A thread writes what was appended as numbered objects, the segments, in order; each holds whole lines and is never
changed. Nothing is lost with the reader: a new one appends all segments to files of its own again.
"""

import logging
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multihop.common import clock
from multihop.common.errors import UserError
from multihop.common.files import append_bytes, last_line_end, open_regular
from multihop.common.storage import Folder

_EVERY_S = 1.0
_MERGED = 1000
"""Number of segments that are replaced by one: a listing of a store returns as many names."""
_MAX_SEGMENT_BYTES = 2**30
_NAME = re.compile(r"(?P<launch>\d{8,})-(?P<first>\d{8,})(_(?P<last>\d{8,}))?\.(?P<file>[a-z]+\.jsonl)")

log = logging.getLogger(__name__)


class JournalWriter:
    """Uploads what is appended to files of a folder from now on."""

    def __init__(self, remote: Folder, launch: int, folder: Path, names: Sequence[str]) -> None:
        """Start the thread.

        Args:
            launch: number of this writer; larger than that of any before it.
            names: names of the files, which need not exist.
        """
        self._remote, self._launch, self._folder = remote, launch, folder
        self._offsets = {name: _end(folder / name) for name in names}
        self._number = 0
        self._unanswered: tuple[_Segment, int] | None = None
        """A segment whose write failed, and its end offset. It may be in the store, and a reader may have read it: it
        is written again unchanged."""
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
                    self._write(_Segment(self._launch, self._number, self._number, name), end)

    def _write(self, segment: "_Segment", end: int) -> None:
        offset = self._offsets[segment.file]
        with open_regular(self._folder / segment.file) as file:
            file.seek(offset)
            data = file.read(end - offset)
        self._unanswered = segment, end
        self._remote.write_atomically(segment.name, data)
        self._unanswered = None
        self._number, self._offsets[segment.file] = segment.first + 1, end

    def close(self) -> None:
        """Flush for the last time, and end the thread; raises as `flush`."""
        self._ended.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        is_failing = False
        while not clock.wait(self._ended, _EVERY_S):
            try:
                self.flush()
                is_failing = False
            except OSError as error:
                if not is_failing:
                    log.warning("%s: rows could not be written (%s); trying again", self._remote.location, error)
                is_failing = True


class JournalReader:
    """Appends what writers uploaded to files of its own, each row once. A journal has one reader at a time."""

    def __init__(self, remote: Folder, folder: Path, names: Sequence[str]) -> None:
        """Remove the files, which are made of the journal alone."""
        self._remote, self._folder = remote, folder
        self._seen: set[str] = set()
        self._segments: dict[tuple[int, str], list[_Segment]] = defaultdict(list)
        for name in names:
            (folder / name).unlink(missing_ok=True)

    def read(self, remote: Folder | None = None) -> None:
        """Append what is new, and replace many segments of one writer by one.

        Args:
            remote: the journal by another connection, for example a polled one; None: by that of the constructor.

        Raises:
            OSError: the store cannot be read; nothing is lost, it is read with the next call.
        """
        remote = remote or self._remote
        read_to: dict[tuple[int, str], int] = {}
        """Number of the last segment of each writer and file that was passed."""
        for segment in sorted(map(_Segment.of, remote.names())):
            name, writer = segment.name, (segment.launch, segment.file)
            if segment.last <= read_to.get(writer, -1):
                remote.remove(name)  # part of a merged one, left by a reader that was killed
                continue
            read_to[writer] = segment.last
            if name not in self._seen:
                data = remote.read_bytes(name, _MAX_SEGMENT_BYTES)
                assert len(data) <= _MAX_SEGMENT_BYTES, name
                segment.offset, segment.length = append_bytes(self._folder / segment.file, data), len(data)
                self._seen.add(name)
                if segment.last == segment.first:
                    self._segments[segment.launch, segment.file].append(segment)
        for segments in self._segments.values():
            if len(segments) >= _MERGED:
                self._merge(segments)

    def newest_launch(self) -> int:
        """Return the number of the newest writer; 0: none has written."""
        return max((_Segment.of(name).launch for name in self._remote.names()), default=0)

    def _merge(self, segments: "list[_Segment]") -> None:
        whole = _Segment(segments[0].launch, segments[0].first, segments[-1].last, segments[0].file)
        with open_regular(self._folder / whole.file) as file:
            chunks = []
            for segment in segments:
                file.seek(segment.offset)
                chunks.append(file.read(segment.length))
        self._seen.add(whole.name)  # before it is written: its rows were read already, even if the response is lost
        self._remote.write_atomically(whole.name, b"".join(chunks))
        for segment in segments:
            self._remote.remove(segment.name)
        segments.clear()


@dataclass
class _Segment:
    """An object with rows of one file: what a writer wrote at once, or many of these. Segments are in the order of
    their rows; a merged one is before those that it is made of."""

    launch: int
    first: int
    last: int
    file: str
    offset: int = 0
    """Offset of its rows in the reader's file."""
    length: int = 0
    """Bytes of its rows."""

    def __lt__(self, other: "_Segment") -> bool:
        mine, its = ((each.launch, each.first, -each.last, each.file) for each in (self, other))
        return mine < its

    @property
    def name(self) -> str:
        numbers = f"{self.first:08d}" if self.first == self.last else f"{self.first:08d}_{self.last:08d}"
        return f"{self.launch:08d}-{numbers}.{self.file}"

    @classmethod
    def of(cls, name: str) -> "_Segment":
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(f"{name} is not a segment of a journal; remove it from the run's directory `journal`")
        first = int(match["first"])
        return cls(int(match["launch"]), first, int(match["last"] or first), match["file"])


def _end(path: Path) -> int:
    if not path.exists():
        return 0
    with open_regular(path) as file:
        return last_line_end(file)
