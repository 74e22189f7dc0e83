"""BERT (Devlin et al. 2018): a bidirectional post-layer-norm encoder with a masked-word and a next-sentence head."""

from torch import Tensor, nn, zeros
from torch.nn import functional as F

from pretrain.config import ModelConfig
from pretrain.models.attention import Sequences
from pretrain.models.blocks import PostNormLayer, look_up
from pretrain.models.dropout import Dropout
from pretrain.models.vocabulary import vocabulary_loss

EPS = 1e-12


class Bert(nn.Module):
    """The encoder and the two heads of pretraining."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.segment = nn.Embedding(2, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(
            PostNormLayer(config, causal=False, approximate="none", eps=EPS) for _ in range(config.layers)
        )
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))
        self.next_sentence = nn.Linear(config.hidden, 2)

    def encode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        bounds: Tensor,
        longest: int,
        segments: Tensor | None = None,
        tied: bool = False,
    ) -> Tensor:
        """Hidden states (N, H) of sequences that stand one behind the other.

        Args:
            input_ids: int64 (N,).
            positions: int64 (N,), each piece's place in its sequence.
            bounds: int64 (S + 1,), where each sequence begins, and N.
            longest: the most pieces of a sequence.
            segments: int64 (N,), 0 or 1; None: all 0.
            tied: the word embedding gets a gradient from the vocabulary's projection too.
        """
        sequences = Sequences(bounds, longest, len(input_ids))
        kinds = self.segment.weight[0] if segments is None else self.segment(segments)
        x = look_up(self.word, input_ids, tied) + self.position(positions) + kinds
        x = self.dropout(self.embedding_norm(x))
        for layer in self.layers:
            x = layer(x, sequences)
        return x

    def pool(self, first: Tensor) -> Tensor:
        """(B, H) -> (B, H): each sequence's first state through a dense layer and a tanh."""
        return self.pooler(first).tanh()

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
        segments: Tensor,
        masked_at: Tensor,
        masked_ids: Tensor,
        is_random_next: Tensor,
    ) -> dict[str, Tensor]:
        """Sums of the cross-entropies in nats, and next-sentence hits.

        The vocabulary is projected to at the masked positions only.

        Args:
            input_ids, positions, bounds, longest, segments: as in `encode`; a sequence is a pair of segments.
            masked_at: int64 (M,), which of the N pieces to predict.
            masked_ids: int64 (M,), what stood there.
            is_random_next: int64 (B,), 1 where the second segment does not follow the first.
        """
        hidden = self.encode(input_ids, positions, bounds, longest, segments, tied=True)
        masked = self.before_words(hidden.index_select(0, masked_at))
        pairs = self.next_sentence(self.pool(hidden.index_select(0, bounds[:-1]))).float()
        return {
            "token": vocabulary_loss(masked, self.word.weight, self.word_bias, masked_ids),
            "nsp": F.cross_entropy(pairs, is_random_next, reduction="sum"),
            "nsp_hits": (pairs.argmax(-1) == is_random_next).sum(),
        }
