"""The choice of the next token among all, by its probability."""

from dataclasses import dataclass

import torch
from torch import Tensor

from multihop.common.errors import UserError

_MIN_TEMPERATURE = 1e-30
"""Logits divided by less overflow in fp32."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the draw of a token. The draws of a text depend on the seed and on its number among the prompts."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_k: int | None = None
    """Only the k likeliest tokens (Fan et al. 2018, section 5.4); None: all."""
    top_p: float | None = None
    """Only the likeliest tokens that together have this probability (Holtzman et al. 2020, section 3.1), after `top_k`;
    None: all."""
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.temperature >= _MIN_TEMPERATURE:
            raise UserError(
                f"temperature={self.temperature} is less than {_MIN_TEMPERATURE:g}; omit it for greedy decoding"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} is less than 1; give the number of tokens to choose among")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} is not a probability above 0; give one up to 1")


def sample(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """One token for each row of logits.

    Args:
        logits: (S, V).
        uniform: (S,), from [0, 1): position in the probability mass, the likeliest tokens first.

    Returns:
        int64 (S,).
    """
    k = logits.shape[1] if sampling.top_k is None else min(sampling.top_k, logits.shape[1])
    best = (logits.float() / sampling.temperature).topk(k)
    probabilities = best.values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    if sampling.top_p is not None:
        # The first token stays, whatever its probability.
        probabilities = probabilities.where(before < sampling.top_p, 0.0)
    upto = probabilities.cumsum(-1)
    mass = upto[:, -1:] * uniform[:, None].to(upto)
    # Rounding must not choose behind the last token that is left.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    rank = torch.minimum((upto <= mass).sum(-1, keepdim=True), last)
    return best.indices.gather(1, rank)[:, 0]
