"""RoBERTa (Liu et al. 2019): BERT's encoder without segments and pairs, trained on masked tokens alone."""

from torch import Generator, Tensor, nn, zeros
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import (
    PostNormLayer,
    apply_layers,
    embed_with_positions,
    gelu,
    position_embedding,
)
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.init import STD, add_neighbors
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.roberta.config import RobertaConfig
from multihop.pretrain.packed_tokens import PackedTokens

EPS = 1e-5


class Roberta(Model):
    """The encoder and the masked-token head."""

    config: RobertaConfig

    def __init__(self, config: RobertaConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = position_embedding(config)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(config, causal=False, activation=gelu, eps=EPS) for _ in range(config.layers)
        )
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Normal, as in the published code."""
        nn.init.normal_(parameter, std=STD, generator=generator)
        if self.config.attention_init == "neighbors":
            add_neighbors(self.config, name, parameter)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Hidden states (N, H), or (M, H), of packed sequences; see `Model.encode`."""
        assert packed.token_type_ids is None, "RoBERTa has no token types"
        assert cache is None, "RoBERTa is not causal"
        sequences = Sequences.of(packed)
        x = embed_with_positions(self.word, self.position, packed, sparse_lookup_grad)
        x = self.dropout(self.embedding_norm(x))
        return apply_layers(self.layers, x, sequences, token_indices)

    def lm_head_transform(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, H): the inputs of the output projection."""
        return self.transform_norm(F.gelu(self.transform(hidden)))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return F.linear(self.lm_head_transform(hidden), self.word.weight, self.word_bias)

    def forward(self, packed: PackedTokens[Tensor], masked_positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats at the masked positions.

        Args:
            masked_positions: int64 (M,), which of the N tokens to predict.
            labels: int64 (M,), the original tokens there.
        """
        hidden = self.encode(packed, sparse_lookup_grad=True, token_indices=masked_positions)
        masked = self.lm_head_transform(hidden)
        return {"mlm": fused_linear_cross_entropy(masked, self.word.weight, self.word_bias, labels)}
