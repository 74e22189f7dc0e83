"""The ModernBERT decoder (Weller et al. 2025): the same layers under a causal mask."""

from torch import Tensor

from multihop.pretrain.models.modernbert.model import ModernModel
from multihop.pretrain.models.modernbert_decoder.config import ModernBertDecoderConfig
from multihop.pretrain.packed_tokens import PackedTokens


class ModernBertDecoder(ModernModel):
    """The decoder, trained on the next token."""

    config: ModernBertDecoderConfig

    def __init__(self, config: ModernBertDecoderConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size, causal=True)

    def forward(self, packed: PackedTokens[Tensor], labels: Tensor) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of predicting labels, int64 (N,), the token after each."""
        return {"clm": self._cross_entropy(self.encode(packed, sparse_lookup_grad=True), labels)}
