"""ALBERT (Lan et al. 2020): BERT with a factorized embedding, one block for all layers, and a sentence-order head."""

from torch import Generator, Tensor, cat, nn, zeros
from torch.nn import functional as F

from multihop.pretrain.models.albert.config import AlbertConfig
from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import (
    PostNormLayer,
    apply_layers,
    embed_with_positions,
    gelu_tanh,
    position_embedding,
)
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.init import add_neighbors, truncated_normal_
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens

EPS = 1e-12


class Albert(Model):
    """The encoder and its two pretraining heads. E is the width of the embeddings, H of the residual stream."""

    config: AlbertConfig

    def __init__(self, config: AlbertConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.embedding)
        self.position = position_embedding(config)
        self.segment = nn.Embedding(2, config.embedding)
        self.embedding_norm = nn.LayerNorm(config.embedding, eps=EPS)
        self.dropout = Dropout(config.dropout)
        self.widen = nn.Linear(config.embedding, config.hidden)
        # A list of one block, because code outside that transforms a model's blocks iterates over `layers`.
        self.layers = nn.ModuleList([PostNormLayer(config, causal=False, activation=gelu_tanh, eps=EPS)])
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.transform = nn.Linear(config.hidden, config.embedding)
        self.transform_norm = nn.LayerNorm(config.embedding, eps=EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))
        self.sentence_order = nn.Linear(config.hidden, 2)

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Truncated normal, as `truncated_normal_initializer` in the published code."""
        truncated_normal_(parameter, generator)
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
        assert cache is None, "ALBERT is not causal"
        sequences = Sequences.of(packed)
        types = packed.token_type_ids
        x = embed_with_positions(self.word, self.position, packed, sparse_lookup_grad)
        x = x + (self.segment.weight[0] if types is None else self.segment(types))
        x = self.widen(self.dropout(self.embedding_norm(x)))
        return apply_layers([self.layers[0]] * self.config.layers, x, sequences, token_indices)

    def pool(self, first: Tensor) -> Tensor:
        """(S, H) -> (S, H): a dense layer and a tanh, applied to the first token's state of each sequence."""
        return self.pooler(first).tanh()

    def lm_head_transform(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, E): the inputs of the output projection."""
        return self.transform_norm(F.gelu(self.transform(hidden), approximate="tanh"))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return F.linear(self.lm_head_transform(hidden), self.word.weight, self.word_bias)

    def forward(
        self,
        packed: PackedTokens[Tensor],
        masked_positions: Tensor,
        labels: Tensor,
        is_swapped: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Sums of the cross-entropies in nats, and how many pairs the sentence-order head got right.

        Args:
            packed: a sequence is a pair of segments.
            masked_positions: int64 (M,), which of the N tokens to predict; logits are computed for these only.
            labels: int64 (M,), the original tokens there.
            is_swapped: int64 (S,), 1 where the second segment came first in the text; None: mlm alone.
        """
        token_indices = cat([masked_positions, packed.cu_seqlens[:-1]])
        hidden = self.encode(packed, sparse_lookup_grad=True, token_indices=token_indices)
        masked = self.lm_head_transform(hidden[: len(masked_positions)])
        mlm = fused_linear_cross_entropy(masked, self.word.weight, self.word_bias, labels)
        pairs = self.sentence_order(self.pool(hidden[len(masked_positions) :])).float()
        if is_swapped is None:
            # The pair head gets a gradient of zeros, with which all ZeRO stages update it alike.
            return {"mlm": mlm + 0.0 * pairs.sum()}
        return {
            "mlm": mlm,
            "sop": F.cross_entropy(pairs, is_swapped, reduction="sum"),
            "sop_hits": (pairs.argmax(-1) == is_swapped).sum(),
        }
