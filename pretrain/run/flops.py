"""Floating-point operations of a step, counted from shapes."""

import numpy as np
from numpy.typing import NDArray

from pretrain.models.config import ModelConfig
from pretrain.models.families import FAMILIES
from pretrain.objectives.batch import Batch


def step_flops(model: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """FLOPs of a forward and backward pass over a batch; 0 for a borrowed batch (all counts 0).

    A multiply-add counts as two. Recomputed activations are not counted, nor are operations other than matrix products
    (Narayanan et al. 2021, section 5.1; Chowdhery et al. 2022, appendix B).
    """
    if not any(batch.counts.values()):
        return 0.0
    lengths = np.diff(batch.inputs["cu_seqlens"])
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
    head = predicted * model.embedding * (vocab_size + (0 if family.causal else hidden))
    widen = tokens * model.embedding * hidden if family.factorized_embedding else 0.0
    return 3 * 2 * (projections + model.layers * attention + head + widen)
