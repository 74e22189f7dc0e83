"""The ModernBERT decoder (Weller et al. 2025): the same layers under a causal mask."""

from torch import Tensor

from multihop.pretrain.models.modernbert.model import ModernModel
from multihop.pretrain.models.modernbert_decoder.config import ModernBertDecoderConfig
from multihop.pretrain.packed_tokens import PackedTokens


class ModernBertDecoder(ModernModel):
    """The decoder, trained on the next token or on completions."""

    config: ModernBertDecoderConfig

    def __init__(self, config: ModernBertDecoderConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size, causal=True)

    def forward(
        self, packed: PackedTokens[Tensor], labels: Tensor, predicting_positions: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of predicting labels, int64 (N,), the token after each.

        Args:
            predicting_positions: int64 (M,), the tokens after which the labels, (M,), are: completion predicts targets
                alone; None: all.
        """
        hidden = self.encode(packed, sparse_lookup_grad=True, token_indices=predicting_positions)
        return {"clm" if predicting_positions is None else "completion": self._cross_entropy(hidden, labels)}
