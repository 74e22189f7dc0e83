"""Floating-point operations of a step, counted from shapes."""

import numpy as np
from numpy.typing import NDArray

from multihop.pretrain.models.common.relative_positions import distances
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.batch import Batch

_GATES = {"lstm": 4, "gru": 3}


def step_flops(model: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """FLOPs of a forward and backward pass over a batch; 0 for a borrowed batch (all counts 0).

    A multiply-add counts as two. Recomputed activations are not counted, nor are operations other than matrix products
    (Narayanan et al. 2021, section 5.1; Chowdhery et al. 2022, appendix B).
    """
    if not any(batch.counts.values()):
        return 0.0
    lengths = np.diff(batch.inputs["cu_seqlens"])
    if FAMILIES[model.family].translates:
        return pair_flops(model, vocab_size, np.diff(batch.inputs["source_cu_seqlens"]), lengths)
    return model_flops(model, vocab_size, lengths, len(batch.targets))


def model_flops(model: ModelConfig, vocab_size: int, lengths: NDArray[np.int64], predicted: int) -> float:
    """FLOPs of a forward and backward pass.

    Args:
        lengths: int64 (S,), tokens of each sequence.
        predicted: for how many tokens logits are computed; the last layer is left out where nothing reads it.
    """
    family, hidden = FAMILIES[model.family], model.hidden
    tokens, pairs = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
    last_tokens = tokens if family.causal else predicted + len(lengths)
    inputs, outputs = 3 * hidden**2, hidden**2 + 2 * hidden * model.intermediate
    projections = model.layers * tokens * inputs + ((model.layers - 1) * tokens + last_tokens) * outputs
    # Under a causal mask a token attends to half of the others.
    attention = 2 * pairs * hidden * (0.5 if family.causal else 1.0)
    if model.max_distance is not None:
        attention += tokens * hidden * distances(model.max_distance, family.causal)
    head = predicted * model.embedding * (vocab_size + (0 if family.causal else hidden))
    widen = tokens * model.embedding * hidden if family.factorized_embedding else 0.0
    return 3 * 2 * (projections + model.layers * attention + head + widen)


def pair_flops(model: ModelConfig, vocab_size: int, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> float:
    """FLOPs of a forward and backward pass of a family that translates.

    Args:
        vocab_size: of the target.
        sources, targets: int64 (S,), tokens of each source with its end, and of each target with its start.
    """
    source, target = sources.astype(np.float64), targets.astype(np.float64)
    count = _recurrent if model.cell is not None else _attentional
    return 3 * 2 * (count(model, source, target) + target.sum() * model.hidden * vocab_size)


def _attentional(model: ModelConfig, source: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """Multiply-adds of the encoder and decoder of a transformer, forward."""
    hidden, feed_forward = model.hidden, 2 * model.hidden * model.intermediate
    # Four projections of each token in each attention; keys and values of cross-attention are the source's.
    encoder = source.sum() * (4 * hidden**2 + feed_forward)
    decoder = target.sum() * (6 * hidden**2 + feed_forward) + source.sum() * 2 * hidden**2
    scores = (source**2).sum() + 0.5 * (target**2).sum() + (source * target).sum()
    return float(model.layers * (encoder + decoder + 2 * hidden * scores))


def _recurrent(model: ModelConfig, source: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """Multiply-adds of the encoder, decoder and attention of a recurrent model, forward."""
    hidden, gates = model.hidden, _GATES[str(model.cell)]
    # Two directions of half the width: inputs H to 2 * H / 2, states H / 2 to H / 2 twice.
    encoder = source.sum() * model.layers * gates * (hidden**2 + hidden**2 / 2)
    feeds = bool(model.input_feeding) or model.attention == "additive"
    decoder = target.sum() * gates * hidden**2 * (2 * model.layers + (1 if feeds else 0))
    attention = 0.0
    if model.attention != "none":
        attention = 2 * hidden * (source * target).sum()  # scores and contexts
        attention += source.sum() * (0 if model.attention == "dot" else hidden**2)
        attention += target.sum() * (hidden**2 if model.attention in ("additive", "concat") else 0)
        attention += target.sum() * hidden**2 * (6 if model.attention == "additive" else 2)
    return float(encoder + decoder + attention)
