"""GPT (Radford et al. 2018): a causal post-layer-norm decoder whose output matrix is its input embedding."""

from torch import Generator, Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.gpt.config import GPTConfig
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import (
    PostNormLayer,
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


class GPT(Model):
    """The decoder. Its last block ends in a norm, so there is no final one."""

    config: GPTConfig

    def __init__(self, config: GPTConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = position_embedding(config)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(config, causal=True, activation=gelu_tanh, eps=EPS) for _ in range(config.layers)
        )

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Normal (section 4.1)."""
        nn.init.normal_(parameter, std=STD, generator=generator)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Hidden states (N, H), or (M, H), of packed sequences; see `Model.encode`."""
        assert packed.token_type_ids is None, "GPT has no token types"
        sequences = Sequences.of(packed, cache)
        x = self.dropout(embed_with_positions(self.word, self.position, packed, sparse_lookup_grad))
        return apply_layers(self.layers, x, sequences, token_indices)

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
