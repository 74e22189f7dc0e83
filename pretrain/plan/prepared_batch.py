"""A micro-batch of a recipe whose data is prepared, and the number of its held-out samples."""

from pathlib import Path

from multihop.data_prep.dataset.shards import open_dataset
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.data.index import build_indexes, open_index
from multihop.pretrain.objectives.batch import Batch

_STEPS = 4
"""Steps of a phase whose micro-batches are looked at."""


def prepared_batch(
    config: TrainingConfig,
    phase: int,
    samples: int,
    world_size: int,
    data: Path,
    index: Path,
    shard_request_dir: Path | None = None,
) -> tuple[Batch, float]:
    """The micro-batch of rank 0 with the most tokens in the first steps of a phase, and the mean number of tokens.

    Args:
        samples: Samples of a micro-batch; with `global_batch_tokens` the recipe decides.
        data: Directory of the prepared data.
        index: Directory of the indexes that training uses; those that it lacks are built.
        shard_request_dir: As for `BatchBuilder.open`; the indexes are there then.
    """
    # The steps of a batch-size ramp may have fewer samples than a micro-batch.
    phases = [each.model_copy(update={"batch_ramp": []}) for each in config.phases]
    config = config.model_copy(update={"phases": phases})
    if shard_request_dir is None:
        build_indexes(index, open_dataset(data), config)
    builder = BatchBuilder.open(config, data, index, 0, world_size, [samples] * len(phases), shard_request_dir)
    first = sum(each.steps for each in phases[:phase])
    builder.request_shards(first)
    batches = [
        batch
        for step in range(first, first + min(_STEPS, phases[phase].steps))
        for batch in builder.step(step).micro_batches
    ]
    return max(batches, key=lambda batch: batch.tokens), sum(batch.tokens for batch in batches) / len(batches)


def count_heldout(config: TrainingConfig, data: Path, index: Path) -> int:
    """Return the number of samples that the held-out documents yield."""
    opened = open_dataset(data)
    build_indexes(index, opened, config)
    return open_index(index, opened, "heldout", config.objective, config.phases[0].seq_len).size
