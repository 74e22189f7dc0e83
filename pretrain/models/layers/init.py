"""Distributions of initial weights that several families share, and `model.attention_init: neighbors`.

With the latter, the heads of the first layer attend to the tokens next to each token.

A masked language model knows only the position of a masked token: until some head finds the adjacent tokens by their
positions, it predicts from the text as a whole, and small models stay at that loss for thousands of steps. With
sinusoidal position embeddings, a shift by d positions is a rotation (Vaswani et al. 2017, section 3.5); a head whose
keys are its queries rotated by d attends to the token d positions away. As in the structured initialization of Zheng et
al. (2024, arXiv 2404.01139), the architecture is unchanged, and training may change all of these weights.
"""

import math

import torch
from torch import Generator, Tensor, nn

from multihop.pretrain.models.config import EncoderConfig

STD = 0.02
"""Standard deviation of the initial weights of most families."""
_LONGEST_PERIOD = 512.0
"""The sinusoids' longest period in tokens; the shortest is 2. Periods are evenly spaced on a logarithmic scale, so that
the score falls with the logarithm of the distance, and the attention weight with a power of it."""
_POSITION_STD = 0.04
"""Twice that of the token embeddings, so that positions outweigh tokens in the scores."""
_POSITION_SHARE = 0.8
"""The positions' share of the variance of the first layer's input: 0.04^2 / (0.04^2 + 0.02^2)."""
_PEAK = 16.0
"""The score of a token at the head's distance; it falls to about 0 half of the longest period away."""


def truncated_normal_(parameter: Tensor, generator: Generator) -> None:
    """Fill a tensor with normal values of standard deviation `STD`, cut off at two of them."""
    nn.init.trunc_normal_(parameter, std=STD, a=-2 * STD, b=2 * STD, generator=generator)


def add_neighbors(config: EncoderConfig, name: str, parameter: Tensor) -> None:
    """Turn one parameter's random initial weights into those of `model.attention_init: neighbors`.

    The heads attend 1 token back, 1 ahead, 2 back, 2 ahead, and so on. The families with this key are post-norm and
    normalize their embeddings, so that the scores do not depend on the embeddings' norm. ALBERT's projection of the
    embeddings begins near the identity, and the weights of the first layer are those of all its layers.
    """
    if name == "position.weight":
        angles = torch.arange(len(parameter), dtype=torch.float64)[:, None] * _frequencies(config)
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1) * (math.sqrt(2) * _POSITION_STD)
        parameter[:, : waves.shape[1]] = waves
    elif name == "widen.weight":
        parameter += torch.eye(*parameter.shape)
    elif name in ("layers.0.attention.query.weight", "layers.0.attention.key.weight"):
        width = config.hidden // config.heads
        for head in range(config.heads):
            distance = 0 if "query" in name else (head // 2 + 1) * (1 if head % 2 else -1)
            rows = _rotation(config, width, distance)
            parameter[head * width : head * width + rows.shape[0], : rows.shape[1]] += rows


def _frequencies(config: EncoderConfig) -> Tensor:
    """float64 (E // 2,): the frequencies of the sinusoids, in radians per token."""
    pairs = config.embedding_width // 2
    return math.pi * torch.logspace(0, -math.log2(_LONGEST_PERIOD / 2), pairs, base=2, dtype=torch.float64)


def _rotation(config: EncoderConfig, width: int, distance: int) -> Tensor:
    """float32 (R, E), R <= `width`: maps the sinusoids of a position to R of those of the position `distance` tokens
    before it."""
    frequencies = _frequencies(config)
    pairs = min(width // 2, len(frequencies))
    chosen = torch.linspace(0, len(frequencies) - 1, pairs).round().long()
    scale = math.sqrt(_PEAK * math.sqrt(width) / max(1.0, 2 * pairs * _POSITION_SHARE))
    cos, sin = (frequencies[chosen] * distance).cos(), (frequencies[chosen] * distance).sin()
    rows = torch.zeros(pairs, 2, 2 * len(frequencies), dtype=torch.float64)
    each = torch.arange(pairs)
    rows[each, 0, 2 * chosen], rows[each, 0, 2 * chosen + 1] = cos, -sin
    rows[each, 1, 2 * chosen], rows[each, 1, 2 * chosen + 1] = sin, cos
    return scale * rows.flatten(0, 1).float()
