"""The layers of ModernBERT and the ModernBERT decoder."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import SelfAttention, select_tokens
from multihop.pretrain.models.layers.rotary import Rotation, rotation_of
from multihop.pretrain.models.modernbert.config import ModernConfig

EPS = 1e-5


class ModernFeedForward(nn.Module):
    """GEGLU (Shazeer 2020): one projection through a GELU times another one, then the output projection. Without the
    gate, the projection itself goes through the GELU."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        gated = config.feed_forward == "geglu"
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False) if gated else None
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (N, H)."""
        activated = F.gelu(self.up(x)) if self.gate is None else F.gelu(self.gate(x)) * self.up(x)
        return self.down(self.dropout(activated))


class ModernLayer(nn.Module):
    """A block without biases. The first pre-norm one has no norm before attention, because the embedding has one."""

    def __init__(self, config: ModernConfig, layer: int, causal: bool) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        is_first = self.pre_norm and layer == 0
        self.attention_norm = nn.Identity() if is_first else nn.LayerNorm(config.hidden, eps=EPS, bias=False)
        window = None if config.is_global(layer) else config.window(causal)
        self.attention = SelfAttention(config, causal, window=window, bias=False)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=EPS, bias=False)
        self.feed_forward = ModernFeedForward(config)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, sequences: Sequences, rotation: Rotation | None, token_indices: Tensor | None = None
    ) -> Tensor:
        """x is (N, H); the result is (N, H), or (M, H) for the tokens at `token_indices`."""
        attended = self.attention(self.attention_norm(x) if self.pre_norm else x, sequences, token_indices, rotation)
        x = select_tokens(x, token_indices) + self.dropout(attended)
        if self.pre_norm:
            return x + self.feed_forward(self.feed_forward_norm(x))
        x = self.attention_norm(x)
        normed: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return normed


def apply_modern_layers(
    config: ModernConfig,
    layers: Iterable[nn.Module],
    x: Tensor,
    positions: Tensor,
    sequences: Sequences,
    token_indices: Tensor | None,
) -> Tensor:
    """Apply all layers to x (N, H): (N, H), or (M, H) for the tokens at `token_indices`; see `blocks.apply_layers`.

    Args:
        positions: int64 (N,).
    """
    width = config.hidden // config.heads
    global_rotation = local_rotation = None
    if config.positions == "rotary":
        global_rotation = rotation_of(positions, width, config.global_rope_theta)
        local_rotation = rotation_of(positions, width, config.local_rope_theta)
    *inner, last = layers
    for number, layer in enumerate(inner):
        x = layer(x, sequences, global_rotation if config.is_global(number) else local_rotation)
    rotation = global_rotation if config.is_global(len(inner)) else local_rotation
    hidden: Tensor = last(x, sequences, rotation, token_indices)
    return hidden
