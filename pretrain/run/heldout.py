"""The held-out loss."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pretrain.data.batches import BatchMaker
from pretrain.engine.engine import Engine
from pretrain.objectives.batch import Batch
from pretrain.run.reference_losses import uniform_loss, unigram_loss


def means(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Means in nats of sums over all ranks: `loss`, which is optimised, its parts, and the accuracy on pairs."""
    parts = {f"{name}_loss": sums[name] / counts[name] for name in sums if name in counts}
    for name in ("nsp", "sop"):
        if f"{name}_hits" in sums:
            parts[f"{name}_accuracy"] = sums[f"{name}_hits"] / counts[name]
    return {"loss": sum(sums[name] / counts[name] for name in sums if name in counts), **parts}


def evaluate(engine: Engine, batches: BatchMaker, alive: Callable[[], None]) -> dict[str, float]:
    """The held-out loss, its parts, and the losses of the two references on the same tokens. A collective call."""
    mine = batches.heldout()
    manifest = batches.data.manifest
    targets = np.concatenate([batch.targets for batch in mine.micro_batches])
    unigram = unigram_loss(batches.token_counts, targets) * len(targets) if len(targets) else 0.0
    references = {"unigram": unigram, "targets": float(len(targets))}
    sums = engine.ranks.all_reduce_sum({**engine.evaluate(_resetting(mine.micro_batches, alive)), **references})
    counts = engine.ranks.all_reduce_sum({name: float(count) for name, count in mine.counts.items()})
    unigram_sum, target_count = sums.pop("unigram"), sums.pop("targets")
    return {
        **{f"heldout_{name}": value for name, value in means(sums, counts).items()},
        "unigram_loss": unigram_sum / target_count,
        "uniform_loss": uniform_loss(manifest.tokenizer.vocab_size),
    }


def _resetting(batches: Iterable[Batch], alive: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        alive()
        yield batch
