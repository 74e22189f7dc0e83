"""RoBERTa (Liu et al. 2019): BERT's encoder without segments and pairs; it learns by masked words alone."""

from torch import Tensor, nn, zeros
from torch.nn import functional as F

from pretrain.config import ModelConfig
from pretrain.models.attention import Sequences
from pretrain.models.blocks import PostNormLayer, look_up
from pretrain.models.dropout import Dropout
from pretrain.models.vocabulary import vocabulary_loss

EPS = 1e-5


class Roberta(nn.Module):
    """The encoder and the masked-word head."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(config, causal=False, approximate="none", eps=EPS) for _ in range(config.layers)
        )
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))

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
        assert segments is None, "RoBERTa has no segments"
        sequences = Sequences(bounds, longest, len(input_ids))
        x = look_up(self.word, input_ids, tied) + self.position(positions)
        x = self.dropout(self.embedding_norm(x))
        for layer in self.layers:
            x = layer(x, sequences)
        return x

    def before_words(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, H): what is projected to the vocabulary."""
        return self.transform_norm(F.gelu(self.transform(hidden)))

    def word_logits(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, vocabulary)."""
        return F.linear(self.before_words(hidden), self.word.weight, self.word_bias)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        bounds: Tensor,
        longest: int,
        masked_at: Tensor,
        masked_ids: Tensor,
    ) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats at the masked positions.

        Args:
            input_ids, positions, bounds, longest: as in `encode`.
            masked_at: int64 (M,), which of the N pieces to predict.
            masked_ids: int64 (M,), what stood there.
        """
        hidden = self.encode(input_ids, positions, bounds, longest, tied=True)
        masked = self.before_words(hidden.index_select(0, masked_at))
        return {"token": vocabulary_loss(masked, self.word.weight, self.word_bias, masked_ids)}
