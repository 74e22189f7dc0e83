"""ModernBERT (Warner et al. 2024), and what the ModernBERT decoder shares with it."""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from multihop.common.config import FINE_TUNING, MEMORY, UPDATES
from multihop.common.errors import UserError
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, AttentionConfig, OutputBias, WordInit
from multihop.pretrain.models.family import Family, sizes


def shared_presets(name: str, ettin: str) -> dict[str, dict[str, Any]]:
    """The presets that ModernBERT and the ModernBERT decoder have in common.

    Args:
        name: beginning of the names of the small sizes, for CPUs.
        ettin: beginning of the names of the sizes of the Ettin suite (Weller et al. 2025, table 1, and config.json).
    """
    return {
        f"{name}-tiny": sizes(4, 128, 2, 1024, intermediate=192),
        f"{name}-mini": sizes(6, 256, 4, 1024, intermediate=384),
        f"{ettin}-17m": _ettin(7, 256, 4, 384),
        f"{ettin}-32m": _ettin(10, 384, 6, 576),
        f"{ettin}-68m": _ettin(19, 512, 8, 768),
        f"{ettin}-150m": _ettin(22, 768, 12, 1152),
        f"{ettin}-400m": _ettin(28, 1024, 16, 2624),
        f"{ettin}-1b": _ettin(28, 1792, 28, 3840),
    }


def _ettin(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return sizes(layers, hidden, heads, 7999, intermediate=intermediate, local_rope_theta=160_000.0)


class ModernConfig(AttentionConfig):
    """What ModernBERT and the ModernBERT decoder have in common: rotary positions, GEGLU, pre-norm without biases, and
    sliding-window attention in most layers. `positions`, `feed_forward` and `norm` switch these parts one at a time,
    to measure them."""

    dropout: Annotated[float, UPDATES | MEMORY | FINE_TUNING] = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout rate after the embeddings, of the attention weights, after the attention's output projection, and before
    the feed-forward's."""
    intermediate: Annotated[int, SIZES] = Field(ge=1)
    """Width between the projections of a feed-forward block; default 1.5 * `hidden`, as in ModernBERT-base."""
    local_attention: Annotated[int, SIZES] = Field(default=128, ge=2)
    """Width of the sliding window of the local layers, in tokens: a token attends to those at most half of this away
    on each side; a causal one to itself and to `local_attention` / 2 - 1 tokens before it."""
    global_attn_every_n_layers: Annotated[int, SIZES] = Field(default=3, ge=1)
    """Every n-th layer, beginning with the first, attends to the whole sequence, the others within the window; 1: all
    layers."""
    global_rope_theta: Annotated[float, SIZES] = Field(default=160_000.0, ge=1.0)
    """Base of the wavelengths of the rotary positions in global layers."""
    local_rope_theta: Annotated[float, SIZES] = Field(default=10_000.0, ge=1.0)
    """Base of the wavelengths of the rotary positions in local layers."""
    positions: Annotated[Literal["rotary", "learned"], SIZES] = "rotary"
    """Position embeddings: rotary (Su et al. 2021), as published, or learned and absolute, as in BERT."""
    feed_forward: Annotated[Literal["geglu", "gelu"], SIZES] = "geglu"
    """Feed-forward blocks. geglu: as published; gelu: without the gate, with two matrices instead of three."""
    norm: Annotated[Literal["pre", "post"], SIZES] = "pre"
    """Position of the layer norms. pre: before each sublayer and after the last layer, as published; post: after each
    residual sum, as in BERT."""
    word_init: WordInit = "random"
    output_bias: OutputBias = "zeros"

    @model_validator(mode="before")
    @classmethod
    def _fill_intermediate(cls, content: Any) -> Any:
        if isinstance(content, dict) and "hidden" in content and "intermediate" not in content:
            try:
                return {**content, "intermediate": max(1, int(content["hidden"]) * 3 // 2)}
            except (TypeError, ValueError, OverflowError):
                return {**content, "intermediate": 1}  # `hidden` is refused, and only it
        return content

    @model_validator(mode="after")
    def _rotary_needs_even_heads(self) -> "ModernConfig":
        if self.positions == "rotary" and self.hidden // self.heads % 2:
            raise UserError(
                f"hidden={self.hidden} and heads={self.heads} make heads of width {self.hidden // self.heads}, and "
                "rotary positions need an even width; change one of them"
            )
        if self.local_attention % 2:
            raise UserError(
                f"local_attention={self.local_attention} is odd, and each side of the window has half of it; set an "
                "even number"
            )
        return self

    def is_global(self, layer: int) -> bool:
        """Whether a layer, numbered from 0, attends to the whole sequence."""
        return layer % self.global_attn_every_n_layers == 0

    def _multiply_adds(self, lengths: NDArray[np.int64], last_tokens: float, causal: bool) -> float:
        """Multiply-adds of the layers in a forward pass, without embeddings and heads.

        Args:
            last_tokens: number of tokens whose states the last layer computes after its keys and values.
        """
        hidden, tokens, length = self.hidden, float(lengths.sum()), lengths.astype(np.float64)
        matrices = 3 if self.feed_forward == "geglu" else 2
        inputs, outputs = 3 * hidden**2, hidden**2 + matrices * hidden * self.intermediate
        projections = self.layers * tokens * inputs + ((self.layers - 1) * tokens + last_tokens) * outputs
        # Under a causal mask a token attends to half of the others, or to one side of the window.
        everything = float((length**2).sum()) * (0.5 if causal else 1.0)
        window = np.minimum(self.window(causal), length - 1)
        one_side = window * length - window * (window + 1) / 2
        local = float((length + one_side * (1 if causal else 2)).sum())
        global_layers = sum(self.is_global(layer) for layer in range(self.layers))
        scores = global_layers * everything + (self.layers - global_layers) * min(local, everything)
        return projections + 2 * hidden * scores

    def causal_windows(self) -> list[int | None]:
        """See `AttentionConfig.causal_windows`."""
        return [None if self.is_global(layer) else self.window(causal=True) for layer in range(self.layers)]

    def window(self, causal: bool) -> int:
        """The largest distance of a token that a local layer attends to, in tokens."""
        return self.local_attention // 2 - (1 if causal else 0)


class ModernBertConfig(ModernConfig):
    """The recipe's `model` section with `family: modernbert`."""

    family: Annotated[Literal["modernbert"], SIZES] = "modernbert"

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`. What follows the last layer's attention is computed for predicted tokens."""
        stack = self._multiply_adds(lengths, predicted, causal=False)
        return 2 * TRAINING_FACTOR * (stack + predicted * self.hidden * (vocab_size + self.hidden))


FAMILY = Family(
    display_name="ModernBERT",
    config=ModernBertConfig,
    model_class="ModernBert",
    causal=False,
    pooling="first",
    objectives=("mlm",),
    auto_class="AutoModelForMaskedLM",
    presets={
        **shared_presets("modernbert", "ettin-encoder"),
        # Warner et al. 2024, appendix A.
        "modernbert-base": sizes(22, 768, 12, 8192, intermediate=1152),
        "modernbert-large": sizes(28, 1024, 16, 8192, intermediate=2624),
    },
)
