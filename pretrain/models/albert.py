"""ALBERT (Lan et al. 2020): BERT with a narrow embedding, one block used in every layer, and a sentence-order head."""

from torch import Tensor, nn, zeros
from torch.nn import functional as F

from pretrain.config import ModelConfig
from pretrain.models.attention import Sequences
from pretrain.models.blocks import PostNormLayer, look_up
from pretrain.models.dropout import Dropout
from pretrain.models.vocabulary import vocabulary_loss

EPS = 1e-12


class Albert(nn.Module):
    """The encoder and the two heads of pretraining. E is the embedding's width, H the residual stream's."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.embedding)
        self.position = nn.Embedding(config.max_positions, config.embedding)
        self.segment = nn.Embedding(2, config.embedding)
        self.embedding_norm = nn.LayerNorm(config.embedding, eps=EPS)
        self.dropout = Dropout(config.dropout)
        self.widen = nn.Linear(config.embedding, config.hidden)
        # A list of one, so that what is applied to a model's blocks from outside finds this one as it finds others.
        self.layers = nn.ModuleList([PostNormLayer(config, causal=False, approximate="tanh", eps=EPS)])
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.transform = nn.Linear(config.hidden, config.embedding)
        self.transform_norm = nn.LayerNorm(config.embedding, eps=EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))
        self.sentence_order = nn.Linear(config.hidden, 2)

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
        sequences = Sequences(bounds, longest, len(input_ids))
        kinds = self.segment.weight[0] if segments is None else self.segment(segments)
        x = look_up(self.word, input_ids, tied) + self.position(positions) + kinds
        x = self.widen(self.dropout(self.embedding_norm(x)))
        for _ in range(self.config.layers):
            x = self.layers[0](x, sequences)
        return x

    def pool(self, first: Tensor) -> Tensor:
        """(B, H) -> (B, H): each sequence's first state through a dense layer and a tanh."""
        return self.pooler(first).tanh()

    def before_words(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, E): what is projected to the vocabulary."""
        return self.transform_norm(F.gelu(self.transform(hidden), approximate="tanh"))

    def word_logits(self, hidden: Tensor) -> Tensor:
        """(M, H) -> (M, vocabulary)."""
        return F.linear(self.before_words(hidden), self.word.weight, self.word_bias)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        bounds: Tensor,
        longest: int,
        segments: Tensor,
        masked_at: Tensor,
        masked_ids: Tensor,
        is_swapped: Tensor,
    ) -> dict[str, Tensor]:
        """Sums of the cross-entropies in nats, and sentence-order hits.

        Args:
            input_ids, positions, bounds, longest, segments: as in `encode`; a sequence is a pair of segments.
            masked_at: int64 (M,), which of the N pieces to predict.
            masked_ids: int64 (M,), what stood there.
            is_swapped: int64 (B,), 1 where the second segment came first in the text.
        """
        hidden = self.encode(input_ids, positions, bounds, longest, segments, tied=True)
        masked = self.before_words(hidden.index_select(0, masked_at))
        pairs = self.sentence_order(self.pool(hidden.index_select(0, bounds[:-1]))).float()
        return {
            "token": vocabulary_loss(masked, self.word.weight, self.word_bias, masked_ids),
            "sop": F.cross_entropy(pairs, is_swapped, reduction="sum"),
            "sop_hits": (pairs.argmax(-1) == is_swapped).sum(),
        }
