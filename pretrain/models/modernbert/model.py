"""ModernBERT (Warner et al. 2024), after its published code and transformers."""

import math

from torch import Generator, Tensor, nn, zeros
from torch.nn import functional as F

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import embed_with_positions
from multihop.pretrain.models.layers.fused_linear_cross_entropy import fused_linear_cross_entropy
from multihop.pretrain.models.layers.init import truncated_normal_
from multihop.pretrain.models.layers.key_value_cache import KeyValueCache
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.models.modernbert.config import ModernBertConfig, ModernConfig
from multihop.pretrain.models.modernbert.layers import EPS, ModernLayer, apply_modern_layers
from multihop.pretrain.packed_tokens import PackedTokens


class ModernModel(Model):
    """ModernBERT's stack of layers and its head, bidirectional or causal."""

    config: ModernConfig

    def __init__(self, config: ModernConfig, vocab_size: int, causal: bool) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        learned = config.positions == "learned"
        self.position = nn.Embedding(config.max_positions, config.hidden) if learned else None
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=EPS, bias=False)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(ModernLayer(config, layer, causal) for layer in range(config.layers))
        # The last post-norm layer ends with a norm of its own.
        pre_norm = config.norm == "pre"
        self.final_norm = nn.LayerNorm(config.hidden, eps=EPS, bias=False) if pre_norm else nn.Identity()
        self.transform = nn.Linear(config.hidden, config.hidden, bias=False)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=EPS, bias=False)
        self.word_bias = nn.Parameter(zeros(vocab_size))

    def init_matrix(self, name: str, parameter: Tensor, generator: Generator) -> None:
        """Truncated normal; into the residual stream and in the head divided by sqrt(2 * layers) (Warner et al. 2024,
        appendix A; Shoeybi et al. 2019)."""
        truncated_normal_(parameter, generator)
        if name.endswith(("attention.output.weight", "feed_forward.down.weight", "transform.weight")):
            parameter /= math.sqrt(2 * self.config.layers)

    def encode(
        self,
        packed: PackedTokens[Tensor],
        sparse_lookup_grad: bool = False,
        token_indices: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Hidden states (N, H), or (M, H), of packed sequences; see `Model.encode`."""
        assert packed.token_type_ids is None, "ModernBERT has no token types"
        sequences = Sequences.of(packed, cache)
        x = embed_with_positions(self.word, self.position, packed, sparse_lookup_grad)
        x = self.dropout(self.embedding_norm(x))
        x = apply_modern_layers(self.config, self.layers, x, packed.positions, sequences, token_indices)
        hidden: Tensor = self.final_norm(x)
        return hidden

    def lm_head_transform(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, H): what the output projection is applied to."""
        return self.transform_norm(F.gelu(self.transform(hidden)))

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits (M, V) of hidden states (M, H)."""
        return F.linear(self.lm_head_transform(hidden), self.word.weight, self.word_bias)

    def _cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross-entropies, in nats, of labels, int64 (M,), given hidden states (M, H)."""
        return fused_linear_cross_entropy(self.lm_head_transform(hidden), self.word.weight, self.word_bias, labels)


class ModernBert(ModernModel):
    """The encoder, trained on masked tokens."""

    config: ModernBertConfig

    def __init__(self, config: ModernBertConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size, causal=False)

    def forward(self, packed: PackedTokens[Tensor], masked_positions: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats at the masked positions.

        Args:
            masked_positions: int64 (M,), which of the N tokens to predict.
            labels: int64 (M,), the original tokens there.
        """
        hidden = self.encode(packed, sparse_lookup_grad=True, token_indices=masked_positions)
        return {"mlm": self._cross_entropy(hidden, labels)}
