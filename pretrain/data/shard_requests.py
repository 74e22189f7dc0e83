"""Shards that are fetched during training: which ones a rank needs next, and the file that requests them.

Where nodes share only an object store and samples are shuffled by windows of shards (see
`multihop.pretrain.data.shard_windows`), a node has only the shards that its ranks' steps need, and those of the next
windows. Ranks write the shards that they need to `REQUEST_FILE` in the run directory; the driver fetches them. All
ranks request the same shards, some steps apart.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from multihop.common.files import read_json_object, write_atomically
from multihop.pretrain.data.order import PhaseStream, SampleOrder, positions_of_step
from multihop.pretrain.data.phases import locate

REQUEST_FILE = "shards-wanted.json"
_POLL_S = 0.05
_WARN_AFTER_S = 10.0

log = logging.getLogger("multihop")


def request_shards(run_dir: Path, shards: Iterable[str]) -> None:
    """Request shards by their file names, in the order in which they will be needed. Others may be removed."""
    write_atomically(run_dir / REQUEST_FILE, json.dumps({"shards": list(shards)}).encode())


def requested_shards(run_dir: Path) -> list[str]:
    """The shards that were last requested; empty without a request."""
    try:
        return list(read_json_object(run_dir / REQUEST_FILE)["shards"])
    except FileNotFoundError:
        return []


def clear_requests(run_dir: Path) -> None:
    """Remove the requests of earlier ranks."""
    (run_dir / REQUEST_FILE).unlink(missing_ok=True)


def await_shard(path: Path) -> None:
    """Wait until a shard exists. If it never does, the watchdog of `engine.hang_timeout_s` ends the process."""
    since, warned = time.monotonic(), False
    while not path.exists():
        if not warned and time.monotonic() - since > _WARN_AFTER_S:
            log.warning("%s is needed and not fetched yet; waiting", path.name)
            warned = True
        time.sleep(_POLL_S)


class ShardRequests:
    """Requests the shards that a rank's steps need, whenever they change."""

    def __init__(self, run_dir: Path, order: SampleOrder, files: Sequence[str]) -> None:
        """`files` are the file names of the training shards."""
        self._run_dir, self._order, self._files = run_dir, order, files
        self._last: list[int] = []
        """The shards that the last request named as needed."""

    def request_from(self, step: int) -> None:
        """Request the shards that the steps from `step` on need."""
        needed = self.needed_from(step)
        if needed == self._last:
            return
        # The data workers of this rank, and other ranks of this node, may be some steps behind.
        behind = max(0, step - 2 * self._order.config.engine.data_workers - 2)
        in_progress = [shard for each in range(behind, step) for shard in sorted(self._shards_at(each)[0])]
        request_shards(self._run_dir, [self._files[number] for number in dict.fromkeys([*needed, *in_progress])])
        self._last = needed

    def needed_from(self, step: int) -> list[int]:
        """The shards that the 0-based step `step` may read, then those that will be needed next: the shards of the next
        windows, and those of the next phase if the rest of this phase needs no others."""
        phases = self._order.config.phases
        current, upcoming = self._shards_at(step)
        phase, step_in_phase = locate(phases, step)
        next_phase = step - step_in_phase + phases[phase].steps  # its first step
        if phase + 1 < len(phases) and self._shards_at(next_phase - 1)[0] <= current | upcoming:
            upcoming |= self._shards_at(next_phase)[0]
        return [*sorted(current), *sorted(upcoming - current)]

    def _shards_at(self, step: int) -> tuple[set[int], set[int]]:
        """The shards that a step's windows read, and those that the windows after these read."""
        phase, positions = positions_of_step(self._order.config.phases, step)
        windows = _windows_at(self._order.stream(phase), int(positions[0]), int(positions[-1]) + 1)
        current, upcoming = (
            set[int]().union(
                *(index.read_by(shards) for index, shards in zip(self._order.index_shards[phase], each, strict=True))
            )
            for each in windows
        )
        return current, upcoming


def _windows_at(stream: PhaseStream, first: int, stop: int) -> tuple[list[set[int]], list[set[int]]]:
    """For each of a phase's indexes, the shards of its windows at positions `first` to `stop` - 1 of the phase's
    stream, and those of its next window. An index is in a window even if none of these positions draws from it."""
    assert stream.windows is not None
    current: list[set[int]] = []
    upcoming: list[set[int]] = []
    begins, ends = (stream.positions_in_sources(position).tolist() for position in (first, stop))
    for source, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        windows, positions, window_end = stream.windows[source], np.arange(begin, max(begin + 1, end)), 0
        current.append(set())
        for part in stream.split_by_epoch(source, positions, positions):
            shards, within = windows.shards(part.within, *part.key)
            current[-1] |= shards
            window_end = part.epoch * stream.sizes[source] + within
        (part,) = stream.split_by_epoch(source, np.array([0]), np.array([window_end]))
        upcoming.append(windows.shards(part.within, *part.key)[0])
    return current, upcoming
