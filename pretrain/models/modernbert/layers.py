"""The layers of ModernBERT and its causal twin."""

import math
from collections.abc import Iterable

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.models.layers.blocks import select_tokens
from multihop.pretrain.models.layers.init import truncated_normal_
from multihop.pretrain.models.layers.rotary import Rotation, rotate, rotation
from multihop.pretrain.models.modernbert.config import ModernConfig

EPS = 1e-5


class RotaryAttention(nn.Module):
    """Multi-head attention with rotary positions and without biases, within a sliding window or to all tokens."""

    def __init__(self, config: ModernConfig, causal: bool, window: int | None) -> None:
        super().__init__()
        self.heads, self.causal, self.window, self.rate = config.heads, causal, window, config.dropout
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, config.hidden, bias=False)
        self.value = nn.Linear(config.hidden, config.hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, sequences: Sequences, by: Rotation, token_indices: Tensor | None = None) -> Tensor:
        """x: (N, H); the result: (N, H), or (M, H) of the tokens at `token_indices`."""
        query, key, value = (project(x).view(len(x), self.heads, -1) for project in (self.query, self.key, self.value))
        attended = attend(
            rotate(query, by),
            rotate(key, by),
            value,
            sequences,
            self.causal,
            self.rate if self.training else 0.0,
            window=self.window,
        )
        return self.output(select_tokens(attended.flatten(1), token_indices))


class GatedFeedForward(nn.Module):
    """GEGLU (Shazeer 2020): one projection through a GELU times another one, then the output projection."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (N, H)."""
        return self.down(self.dropout(F.gelu(self.gate(x)) * self.up(x)))


class ModernLayer(nn.Module):
    """A pre-norm block. The first one's attention has no norm: the embedding's norm precedes it."""

    def __init__(self, config: ModernConfig, layer: int, causal: bool) -> None:
        super().__init__()
        self.is_global = config.is_global(layer)
        self.attention_norm = nn.Identity() if layer == 0 else nn.LayerNorm(config.hidden, eps=EPS, bias=False)
        self.attention = RotaryAttention(config, causal, None if self.is_global else config.window(causal))
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=EPS, bias=False)
        self.feed_forward = GatedFeedForward(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sequences: Sequences, by: Rotation, token_indices: Tensor | None = None) -> Tensor:
        """x: (N, H); the result: (N, H), or (M, H) of the tokens at `token_indices`."""
        attended = self.attention(self.attention_norm(x), sequences, by, token_indices)
        x = select_tokens(x, token_indices) + self.dropout(attended)
        return x + self.feed_forward(self.feed_forward_norm(x))


def apply_modern_layers(
    config: ModernConfig,
    layers: Iterable[nn.Module],
    x: Tensor,
    positions: Tensor,
    sequences: Sequences,
    token_indices: Tensor | None,
) -> Tensor:
    """x (N, H) through all layers: (N, H), or (M, H) of the tokens at `token_indices`; see `blocks.apply_layers`.

    Args:
        positions: int64 (N,).
    """
    width = config.hidden // config.heads
    to_all = rotation(positions, width, config.global_rope_theta)
    in_window = rotation(positions, width, config.local_rope_theta)
    *inner, last = layers
    for number, layer in enumerate(inner):
        x = layer(x, sequences, to_all if config.is_global(number) else in_window)
    hidden: Tensor = last(x, sequences, to_all if config.is_global(len(inner)) else in_window, token_indices)
    return hidden


def init_modern_matrix(config: ModernConfig, name: str, parameter: Tensor, generator: Generator) -> None:
    """Truncated normal; into the residual stream and in the head divided by sqrt(2 * layers) (Warner et al. 2024,
    appendix A; Shoeybi et al. 2019)."""
    truncated_normal_(parameter, generator)
    if name.endswith(("attention.output.weight", "feed_forward.down.weight", "transform.weight")):
        parameter /= math.sqrt(2 * config.layers)
