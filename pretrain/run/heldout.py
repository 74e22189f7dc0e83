"""The held-out loss, and two baselines: the losses of models without context."""

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.run.health import health

MAX_SOURCES = 16
"""Maximum number of sources whose losses are measured separately: each takes a forward pass on every rank."""


def mean_losses(sums: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Means in nats from sums over all ranks: `loss`, which is optimized, its parts, and the accuracy on pairs."""
    parts = {f"{name}_loss": sums[name] / counts[name] for name in sums if name in counts}
    for name in ("nsp", "sop"):
        if f"{name}_hits" in sums:
            parts[f"{name}_accuracy"] = sums[f"{name}_hits"] / counts[name]
    return {"loss": sum(sums[name] / counts[name] for name in sums if name in counts), **parts}


def evaluate(engine: Engine, batches: BatchBuilder, heartbeat: Callable[[], None]) -> dict[str, float]:
    """The held-out loss, its parts, the loss of each source, those of the two baselines on the same tokens, and the
    model's health. A collective call.

    `unigram_gain` is 1 - loss / unigram loss, McFadden's R^2 (1974) with the unigram model as the null model. Unlike a
    difference in nats, it is comparable between vocabularies: 0 on the plateau, 1 at most, negative before the token
    frequencies are learned.

    Raises:
        UserError: The held-out samples have no token to predict. Raised on all ranks.
    """
    share = batches.heldout()
    manifest = batches.data.manifest
    targets = np.concatenate([batch.targets for batch in share.micro_batches])
    unigram_sum = unigram_loss(batches.token_counts, targets) * len(targets) if len(targets) else 0.0
    baselines = {"unigram": unigram_sum, "targets": float(len(targets))}
    sums = engine.ranks.all_reduce_sum(
        {**engine.evaluate(_with_heartbeat(share.micro_batches, heartbeat)), **baselines}
    )
    counts = engine.ranks.all_reduce_sum({name: float(count) for name, count in share.counts.items()})
    if not sums["targets"]:
        raise UserError(_nothing_to_predict(batches))
    unigram = sums.pop("unigram") / sums.pop("targets")
    losses = mean_losses(sums, counts)
    language_model = losses[f"{batches.config.objective.needs.predicts}_loss"]
    return {
        **{f"heldout_{name}": value for name, value in losses.items()},
        "unigram_loss": unigram,
        "uniform_loss": uniform_loss(manifest.output_tokenizer.vocab_size),
        "unigram_gain": 1 - language_model / unigram,
        **_losses_by_source(engine, batches, heartbeat),
        **health(engine, batches, heartbeat),
    }


def unigram_log_probabilities(token_counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 (V,): the log of each token's frequency in the training text.

    Args:
        token_counts: int64 (V,); one is added to each (Laplace), so that no token has probability 0.
    """
    smoothed = token_counts + 1.0
    return np.log(smoothed / smoothed.sum())


def unigram_loss(token_counts: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats of predicting each target by its frequency in the training text.

    Args:
        token_counts: int64 (V,), the counts in the training text.
        targets: int64 (N,), the tokens on which the held-out loss is computed.
    """
    return float(-unigram_log_probabilities(token_counts)[targets].mean())


def uniform_loss(vocab_size: int) -> float:
    """Cross-entropy in nats of the uniform distribution over the vocabulary."""
    return math.log(vocab_size)


def _losses_by_source(engine: Engine, batches: BatchBuilder, heartbeat: Callable[[], None]) -> dict[str, float]:
    """`source0/heldout_mlm_loss` and so on if there are several sources. A collective call.

    The samples are evaluated again, in micro-batches of one source, so that the sums of the held-out loss do not
    change: their rounding depends on which samples share a micro-batch.
    """
    if not 1 < len(batches.data.manifest.sources) <= MAX_SOURCES:
        return {}
    losses, name = {}, batches.config.objective.needs.predicts
    for source, share in batches.heldout_by_source().items():
        sums = engine.ranks.all_reduce_sum(engine.evaluate(_with_heartbeat(share.micro_batches, heartbeat)))
        counts = engine.ranks.all_reduce_sum({name: float(count) for name, count in share.counts.items()})
        if counts[name]:
            losses[f"source{source}/heldout_{name}_loss"] = sums[name] / counts[name]
    return losses


def _nothing_to_predict(batches: BatchBuilder) -> str:
    objective, seq_len = batches.config.objective, batches.config.phases[0].seq_len
    return (
        f"none of the held-out samples ({min(batches.config.engine.heldout_samples, batches.heldout_index.size)} of "
        f"phases[0].seq_len={seq_len} tokens) has a token to predict: with objective.masking={objective.masking} a "
        f"word is masked only if its tokens are at most objective.mask_rate={objective.mask_rate} of the sample's, and "
        "no word is that short; set objective.masking=tokens, which suits scripts without spaces, a longer seq_len, or "
        "more engine.heldout_samples"
    )


def _with_heartbeat(batches: Iterable[Batch], heartbeat: Callable[[], None]) -> Iterator[Batch]:
    for batch in batches:
        heartbeat()
        yield batch
