"""The samples of a step, from the arguments of the law of order alone."""

from collections.abc import Sequence

from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.data.order import GlobalBatchIds, PhaseStream, positions_of_step
from multihop.pretrain.data.shard_windows import ShardWindows


def samples_of_step(
    seed: int,
    fingerprint: str,
    phases: Sequence[PhaseConfig],
    index_sizes: Sequence[Sequence[int]],
    step: int,
    weights: Sequence[float] | None = None,
    windows: Sequence[Sequence[ShardWindows]] | None = None,
) -> GlobalBatchIds:
    """Return the samples of the 0-based step `step` of phases whose indexes have these sizes."""
    phase, positions = positions_of_step(phases, step)
    of_phase = None if windows is None else windows[phase]
    return PhaseStream(seed, fingerprint, phase, index_sizes[phase], weights, of_phase).samples_at(positions)
