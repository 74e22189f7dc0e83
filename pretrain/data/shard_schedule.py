"""Which shards the steps of a run need, and when, where samples are shuffled by windows of shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.index import SampleIndex, source_weights
from multihop.pretrain.data.order import positions_of_step, shards_at
from multihop.pretrain.data.phases import locate
from multihop.pretrain.data.shard_windows import IndexShards, ShardWindows, shards_of_index


@dataclass(frozen=True)
class ShardSchedule:
    """Of one run on one data set."""

    config: TrainingConfig
    fingerprint: str
    """Of the data."""
    indexes: list[list[SampleIndex]]
    """Of each phase: one, or one per source where sources have weights."""
    shard_starts: Sequence[int]
    """The first document of each training shard; the last is the number of documents."""

    @cached_property
    def windows(self) -> list[list[ShardWindows]] | None:
        """As `indexes`; None: samples are not shuffled by windows."""
        together = self.config.data.shuffle_window_shards if self.config.data else None
        if together is None:
            return None
        return [[ShardWindows(place.first_samples, together) for place in places] for places in self._places]

    def needed_from(self, step: int) -> list[int]:
        """The shards that the 0-based step `step` may read, then those that will be needed next: of the next windows,
        and of the next phase if its first step is not far."""
        now, then = self._shards_at(step)
        phase, step_in_phase = locate(self.config.phases, step)
        begins = step - step_in_phase + self.config.phases[phase].steps
        if phase + 1 < len(self.config.phases) and self._shards_at(begins - 1)[0] <= now | then:
            then |= self._shards_at(begins)[0]
        return [*sorted(now), *sorted(then - now)]

    def _shards_at(self, step: int) -> tuple[set[int], set[int]]:
        """Of a step's windows, and of the windows after these."""
        assert self.windows is not None
        phase, positions = positions_of_step(self.config.phases, step)
        sizes, weights = [index.size for index in self.indexes[phase]], source_weights(self.config)
        found = shards_at(self.config.seed, self.fingerprint, phase, sizes, positions, weights, self.windows[phase])
        now, then = (
            set[int]().union(*(place.read(own) for place, own in zip(self._places[phase], shards, strict=True)))
            for shards in found
        )
        return now, then

    @cached_property
    def _places(self) -> list[list[IndexShards]]:
        """As `indexes`."""
        return [
            [shards_of_index(self.config.objective, index, self.shard_starts, phase.seq_len) for index in indexes]
            for phase, indexes in zip(self.config.phases, self.indexes, strict=True)
        ]
