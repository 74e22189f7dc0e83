"""Shards that are fetched while training goes on: which ones a rank needs next, and the file that asks for them.

Where nodes share only an object store and samples are shuffled by windows of shards (see
`multihop.pretrain.data.shard_windows`), a node has only the shards that its ranks' steps need, and those of the next
windows. Ranks write the shards that they need to `WANTED` in the run directory; the driver fetches them. All ranks
write the same shards, some steps apart.
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

WANTED = "shards-wanted.json"
_POLL_S = 0.05
_WARN_AFTER_S = 10.0

log = logging.getLogger("multihop")


def request(run_dir: Path, shards: Iterable[str]) -> None:
    """Ask for shards by their file names, in the order in which they will be needed. Others may be removed."""
    write_atomically(run_dir / WANTED, json.dumps({"shards": list(shards)}).encode())


def requested(run_dir: Path) -> list[str]:
    """The shards that `request` asked for last; empty before."""
    try:
        return list(read_json_object(run_dir / WANTED)["shards"])
    except FileNotFoundError:
        return []


def forget(run_dir: Path) -> None:
    """Remove the requests of earlier ranks."""
    (run_dir / WANTED).unlink(missing_ok=True)


def await_shard(path: Path) -> None:
    """Return when a shard exists. If it never comes, the watchdog of `engine.hang_timeout_s` ends the wait."""
    since, warned = time.monotonic(), False
    while not path.exists():
        if not warned and time.monotonic() - since > _WARN_AFTER_S:
            log.warning("%s is needed and not fetched yet; waiting", path.name)
            warned = True
        time.sleep(_POLL_S)


class ShardRequests:
    """Asks for the shards that the steps of a rank need, whenever they change."""

    def __init__(self, run_dir: Path, order: SampleOrder, files: Sequence[str]) -> None:
        """`files` has the name of each training shard's file."""
        self._run_dir, self._order, self._files = run_dir, order, files
        self._last: list[int] = []
        """The shards that were needed at the last request."""

    def request_from(self, step: int) -> None:
        """Ask for the shards that the steps from `step` on need."""
        needed = self.needed_from(step)
        if needed == self._last:
            return
        # The data workers of this rank, and other ranks of this node, may be some steps behind.
        behind = max(0, step - 2 * self._order.config.engine.data_workers - 2)
        in_progress = [shard for each in range(behind, step) for shard in sorted(self._shards_at(each)[0])]
        request(self._run_dir, [self._files[number] for number in dict.fromkeys([*needed, *in_progress])])
        self._last = needed

    def needed_from(self, step: int) -> list[int]:
        """The shards that the 0-based step `step` may read, then those that will be needed next: of the next windows,
        and of the next phase if its first step is not far."""
        phases = self._order.config.phases
        now, then = self._shards_at(step)
        phase, step_in_phase = locate(phases, step)
        begins = step - step_in_phase + phases[phase].steps
        if phase + 1 < len(phases) and self._shards_at(begins - 1)[0] <= now | then:
            then |= self._shards_at(begins)[0]
        return [*sorted(now), *sorted(then - now)]

    def _shards_at(self, step: int) -> tuple[set[int], set[int]]:
        """The shards that a step's windows read, and those that the windows after these read."""
        phase, positions = positions_of_step(self._order.config.phases, step)
        of_indexes = _windows_at(self._order.stream(phase), int(positions[0]), int(positions[-1]) + 1)
        now, then = (
            set[int]().union(
                *(index.read(shards) for index, shards in zip(self._order.index_shards[phase], each, strict=True))
            )
            for each in of_indexes
        )
        return now, then


def _windows_at(stream: PhaseStream, first: int, stop: int) -> tuple[list[set[int]], list[set[int]]]:
    """For each of a phase's indexes, the shards of its windows at positions `first` to `stop` of the phase's stream,
    and of its next windows. An index that none of these positions draws from is in a window all the same."""
    assert stream.windows is not None
    now: list[set[int]] = []
    then: list[set[int]] = []
    begins, ends = (stream.positions_in_sources(position).tolist() for position in (first, stop))
    for source, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        windows, positions, window_end = stream.windows[source], np.arange(begin, max(begin + 1, end)), 0
        now.append(set())
        for part in stream.split_by_epoch(source, positions, positions):
            shards, within = windows.shards(part.within, *part.key)
            now[-1] |= shards
            window_end = part.epoch * stream.sizes[source] + within
        (part,) = stream.split_by_epoch(source, np.array([0]), np.array([window_end]))
        then.append(windows.shards(part.within, *part.key)[0])
    return now, then
