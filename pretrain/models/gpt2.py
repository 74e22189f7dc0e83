"""GPT-2 (Radford et al. 2019): a causal pre-layer-norm decoder whose output matrix is its input embedding."""

from torch import Tensor, arange, nn
from torch.nn import functional as F

from pretrain.config import ModelConfig
from pretrain.models.blocks import FeedForward, SelfAttention


class Layer(nn.Module):
    """One pre-layer-norm block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = SelfAttention(config.hidden, config.heads, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config.hidden, config.intermediate, approximate="tanh")
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), None, causal=True))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT2(nn.Module):
    """The decoder."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.word = nn.Embedding(vocab_size, config.hidden)
        self.position = nn.Embedding(config.max_positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.hidden)

    def encode(self, input_ids: Tensor, segments: Tensor | None, lengths: Tensor) -> Tensor:
        """Hidden states (B, T, H) of int64 (B, T). A causal model never looks at the padding behind a sequence."""
        assert segments is None, "GPT-2 has no segments"
        x = self.dropout(self.word(input_ids) + self.position(arange(input_ids.shape[1], device=input_ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.final_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(…, H) -> (…, vocabulary)."""
        return F.linear(hidden, self.word.weight)

    def forward(self, input_ids: Tensor, lengths: Tensor, next_ids: Tensor) -> dict[str, Tensor]:
        """Sum of the cross-entropies in nats of predicting next_ids, int64 (B, T), from input_ids, int64 (B, T)."""
        words = self.logits(self.encode(input_ids, None, lengths))
        return {"token": F.cross_entropy(words.flatten(0, 1).float(), next_ids.flatten(), reduction="sum")}
