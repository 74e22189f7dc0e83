"""Shards that are fetched while training goes on: which ones a rank needs next, and the file that asks for them.

Where nodes share only an object store and samples are shuffled by windows of shards (see
`multihop.pretrain.data.shard_windows`), a node has only the shards that its ranks' steps need, and those of the next
windows. Ranks write the shards that they need to `WANTED` in the run directory; the launcher fetches them. All ranks
write the same shards, some steps apart.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from multihop.common.files import read_json_object, write_atomically
from multihop.pretrain.data.index import source_weights
from multihop.pretrain.data.order import (
    Int64,
    SampleOrder,
    positions_in_sources,
    positions_of_step,
    source_key,
    split_by_epoch,
)
from multihop.pretrain.data.phases import locate
from multihop.pretrain.data.shard_windows import ShardWindows

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
        assert order.shard_windows is not None
        self._run_dir, self._order, self._files = run_dir, order, files
        self._windows = order.shard_windows
        self._last: list[int] = []
        """The shards that were needed at the last request."""

    def request_from(self, step: int) -> None:
        """Ask for the shards that the steps from `step` on need."""
        needed = self.needed_from(step)
        if needed == self._last:
            return
        # Other ranks of this node, and the data workers of this rank, may be some steps behind.
        behind = max(0, step - 2 * self._order.config.engine.data_workers - 2)
        kept = dict.fromkeys([*needed, *self.needed_from(behind)])
        request(self._run_dir, [self._files[number] for number in kept])
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
        config = self._order.config
        phase, positions = positions_of_step(config.phases, step)
        of_indexes = _windows_at(
            config.seed,
            self._order.fingerprint,
            phase,
            self._order.sizes[phase],
            positions,
            source_weights(config),
            self._windows[phase],
        )
        now, then = (
            set[int]().union(
                *(index.read(shards) for index, shards in zip(self._order.index_shards[phase], each, strict=True))
            )
            for each in of_indexes
        )
        return now, then


def _windows_at(
    seed: int,
    fingerprint: str,
    phase: int,
    sizes: Sequence[int],
    positions: Int64,
    weights: Sequence[float] | None,
    windows: Sequence[ShardWindows],
) -> tuple[list[set[int]], list[set[int]]]:
    """For each of a phase's indexes, the shards of its windows at positions of the phase's stream, and of its next
    windows.

    The arguments are those of `samples_at`, the positions consecutive ones. An index that none of them draws from is in
    a window all the same.
    """
    now: list[set[int]] = []
    then: list[set[int]] = []
    bounds = int(positions[0]), int(positions[-1]) + 1
    begins, ends = (positions_in_sources(seed, fingerprint, phase, bound, weights).tolist() for bound in bounds)
    for source, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        key, size, of_index = source_key(seed, fingerprint, phase, source, weights), sizes[source], windows[source]
        in_source, window_end = np.arange(begin, max(begin + 1, end)), 0
        now.append(set())
        for part in split_by_epoch(source, in_source, in_source, size, key):
            shards, within = of_index.shards(part.within, *part.key)
            now[-1] |= shards
            window_end = part.epoch * size + within
        (part,) = split_by_epoch(source, np.array([0]), np.array([window_end]), size, key)
        then.append(of_index.shards(part.within, *part.key)[0])
    return now, then
