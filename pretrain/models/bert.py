"""BERT (Devlin et al. 2018): a bidirectional post-layer-norm encoder with a masked-word and a next-sentence head."""

from torch import Tensor, arange, nn, zeros
from torch.nn import functional as F

from pretrain.config import ModelConfig
from pretrain.models.blocks import FeedForward, SelfAttention, padding_mask

_EPS = 1e-12


class Layer(nn.Module):
    """One post-layer-norm block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.hidden, config.heads, config.dropout)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=_EPS)
        self.feed_forward = FeedForward(config.hidden, config.intermediate, approximate="none")
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=_EPS)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, mask, causal=False)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class Bert(nn.Module):
    """The encoder and the two heads of pretraining."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.segment = nn.Embedding(2, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, eps=_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, eps=_EPS)
        self.word_bias = nn.Parameter(zeros(vocab_size))
        self.next_sentence = nn.Linear(config.hidden, 2)

    def encode(self, input_ids: Tensor, segments: Tensor | None, lengths: Tensor) -> Tensor:
        """Hidden states (B, T, H).

        Args:
            input_ids: int64 (B, T).
            segments: int64 (B, T), 0 or 1; None: all 0.
            lengths: int64 (B,), pieces of each sequence; the rest of it is padding.
        """
        length = input_ids.shape[1]
        positions = arange(length, device=input_ids.device)
        kinds = self.segment.weight[0] if segments is None else self.segment(segments)
        x = self.dropout(self.embedding_norm(self.word(input_ids) + self.position(positions) + kinds))
        mask = padding_mask(lengths, length)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def pool(self, hidden: Tensor) -> Tensor:
        """(B, T, H) -> (B, H): the first piece's state through a dense layer and a tanh."""
        return self.pooler(hidden[:, 0]).tanh()

    def forward(
        self,
        input_ids: Tensor,
        segments: Tensor,
        lengths: Tensor,
        masked_at: Tensor,
        masked_ids: Tensor,
        is_random_next: Tensor,
    ) -> dict[str, Tensor]:
        """Sums of the cross-entropies in nats, and next-sentence hits.

        The vocabulary is projected to at the masked positions only.

        Args:
            input_ids, segments: int64 (B, T); lengths: int64 (B,).
            masked_at: int64 (M,), positions in the flattened (B*T,) to predict.
            masked_ids: int64 (M,), what stood there.
            is_random_next: int64 (B,), 1 where the second segment does not follow the first.
        """
        hidden = self.encode(input_ids, segments, lengths)
        masked = hidden.flatten(0, 1).index_select(0, masked_at)
        words = F.linear(self.transform_norm(F.gelu(self.transform(masked))), self.word.weight, self.word_bias)
        pairs = self.next_sentence(self.pool(hidden))
        return {
            "token": F.cross_entropy(words.float(), masked_ids, reduction="sum"),
            "nsp": F.cross_entropy(pairs.float(), is_random_next, reduction="sum"),
            "nsp_hits": (pairs.argmax(-1) == is_random_next).sum(),
        }
