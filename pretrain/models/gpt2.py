"""GPT-2 (Radford et al. 2019): a causal pre-layer-norm decoder whose output matrix is its input embedding."""

from torch import Tensor, nn
from torch.nn import functional as F

from pretrain.config import ModelConfig
from pretrain.models.attention import Sequences
from pretrain.models.blocks import PreNormLayer, look_up
from pretrain.models.dropout import Dropout
from pretrain.models.vocabulary import vocabulary_loss

EPS = 1e-5


class GPT2(nn.Module):
    """The decoder."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PreNormLayer(config, causal=True, approximate="tanh", eps=EPS) for _ in range(config.layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden, eps=EPS)

    def encode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        bounds: Tensor,
        longest: int,
        segments: Tensor | None = None,
        tied: bool = False,
    ) -> Tensor:
        """Hidden states (N, H) of sequences that stand one behind the other; the arguments are those of BERT's."""
        assert segments is None, "GPT-2 has no segments"
        sequences = Sequences(bounds, longest, len(input_ids))
        x = self.dropout(look_up(self.word, input_ids, tied) + self.position(positions))
        for layer in self.layers:
            x = layer(x, sequences)
        return self.final_norm(x)

    def word_logits(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, vocabulary)."""
        return F.linear(hidden, self.word.weight)

    def forward(
        self, input_ids: Tensor, positions: Tensor, bounds: Tensor, longest: int, next_ids: Tensor
    ) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of predicting next_ids, int64 (N,)."""
        hidden = self.encode(input_ids, positions, bounds, longest, tied=True)
        return {"token": vocabulary_loss(hidden, self.word.weight, None, next_ids)}
