"""GPT-2 (Radford et al. 2019): a causal pre-layer-norm decoder whose output matrix is its input embedding."""

import math

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.gpt2.config import GPT2Config
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import (
    PreNormLayer,
    apply_layers,
    embed_with_positions,
    gelu_tanh,
    position_embedding,
)
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.init import STD
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens

EPS = 1e-5


class GPT2(Model):
    """The decoder."""

    config: GPT2Config

    def __init__(self, config: GPT2Config, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = position_embedding(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PreNormLayer(config, causal=True, activation=gelu_tanh, eps=EPS) for _ in range(config.layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden, eps=EPS)

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Normal; projections into the residual stream are divided by sqrt(2 * layers) (section 2.3). Positions have
        the standard deviation of the published code."""
        std = 0.01 if name == "position.weight" else STD
        if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
            std /= math.sqrt(2 * self.config.layers)
        nn.init.normal_(parameter, std=std, generator=generator)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Hidden states (N, H), or (M, H), of packed sequences; see `Model.encode`."""
        assert packed.token_type_ids is None, "GPT-2 has no token types"
        sequences = Sequences.of(packed, cache)
        x = self.dropout(embed_with_positions(self.word, self.position, packed, sparse_lookup_grad))
        return self.final_norm(apply_layers(self.layers, x, sequences, token_indices))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return F.linear(hidden, self.word.weight)

    def forward(
        self, packed: PackedTokens[Tensor], labels: Tensor, predicting_positions: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of predicting labels, int64 (N,), the token after each.

        Args:
            predicting_positions: int64 (M,), the tokens after which the labels, (M,), are: completion predicts targets
                alone; None: all.
        """
        hidden = self.encode(packed, sparse_lookup_grad=True, token_indices=predicting_positions)
        name = "clm" if predicting_positions is None else "completion"
        return {name: fused_linear_cross_entropy(hidden, self.word.weight, None, labels)}
