"""BERT (Devlin et al. 2018): a bidirectional post-layer-norm encoder with a masked-token and a next-sentence head."""

from torch import Generator, Tensor, cat, nn, zeros
from torch.nn import functional as F

from multihop.pretrain.models.bert.config import BertConfig
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
from multihop.pretrain.models.layers.init import add_neighbors, truncated_normal_
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import PackedTokens

EPS = 1e-12


class Bert(Model):
    """The encoder and its two pretraining heads."""

    config: BertConfig

    def __init__(self, config: BertConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = position_embedding(config)
        self.segment = nn.Embedding(2, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(config, causal=False, activation=gelu, eps=EPS) for _ in range(config.layers)
        )
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))
        self.next_sentence = nn.Linear(config.hidden, 2)

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
        assert cache is None, "BERT is not causal"
        sequences = Sequences.of(packed)
        types = packed.token_type_ids
        x = embed_with_positions(self.word, self.position, packed, sparse_lookup_grad)
        x = x + (self.segment.weight[0] if types is None else self.segment(types))
        x = self.dropout(self.embedding_norm(x))
        return apply_layers(self.layers, x, sequences, token_indices)

    def pool(self, first: Tensor) -> Tensor:
        """(S, H) -> (S, H): a dense layer and a tanh, applied to the first token's state of each sequence."""
        return self.pooler(first).tanh()

    def lm_head_transform(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, H): the inputs of the output projection."""
        return self.transform_norm(F.gelu(self.transform(hidden)))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return F.linear(self.lm_head_transform(hidden), self.word.weight, self.word_bias)

    def forward(
        self,
        packed: PackedTokens[Tensor],
        masked_positions: Tensor,
        labels: Tensor,
        is_random_next: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Sums of the cross-entropies in nats, and how many pairs the next-sentence head got right.

        Args:
            packed: a sequence is a pair of segments.
            masked_positions: int64 (M,), which of the N tokens to predict; logits are computed for these only.
            labels: int64 (M,), the original tokens there.
            is_random_next: int64 (S,), 1 where the second segment does not follow the first; None: mlm alone.
        """
        token_indices = cat([masked_positions, packed.cu_seqlens[:-1]])
        hidden = self.encode(packed, sparse_lookup_grad=True, token_indices=token_indices)
        masked = self.lm_head_transform(hidden[: len(masked_positions)])
        mlm = fused_linear_cross_entropy(masked, self.word.weight, self.word_bias, labels)
        pairs = self.next_sentence(self.pool(hidden[len(masked_positions) :])).float()
        if is_random_next is None:
            # The pair head gets a gradient of zeros, with which all ZeRO stages update it alike.
            return {"mlm": mlm + 0.0 * pairs.sum()}
        return {
            "mlm": mlm,
            "nsp": F.cross_entropy(pairs, is_random_next, reduction="sum"),
            "nsp_hits": (pairs.argmax(-1) == is_random_next).sum(),
        }
