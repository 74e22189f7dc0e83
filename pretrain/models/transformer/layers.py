"""The blocks of encoder and decoder (Vaswani et al. 2017, section 3.1)."""

from collections.abc import Callable

from torch import Tensor, nn

from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.layers.blocks import FeedForward, SelfAttention, relu
from multihop.pretrain.models.layers.cross_attention import CrossAttention, PaddedSource, Pairs
from multihop.pretrain.models.transformer.beam_cache import BeamCache
from multihop.pretrain.models.transformer.config import TransformerConfig

EPS = 1e-5

Sublayer = Callable[[Tensor], Tensor]


class _Layer(nn.Module):
    """A residual connection with its norm and dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.dropout = Dropout(config.dropout)

    def add(self, x: Tensor, norm: nn.Module, sublayer: Sublayer) -> Tensor:
        """x and the result: (N, H). post: norm(x + sublayer(x)); pre: x + sublayer(norm(x))."""
        if self.pre_norm:
            return x + self.dropout(sublayer(norm(x)))
        added: Tensor = norm(x + self.dropout(sublayer(x)))
        return added


class EncoderLayer(_Layer):
    """Self-attention and feed-forward. Attention weights have no dropout, as published."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config, causal=False, dropout=0.0)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.feed_forward = FeedForward(config, relu)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=EPS)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        """x and the result: (Ns, H)."""
        x = self.add(x, self.attention_norm, lambda y: self.attention(y, sequences))
        return self.add(x, self.feed_forward_norm, self.feed_forward)


class DecoderLayer(_Layer):
    """Causal self-attention, attention to the source, and feed-forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.attention = SelfAttention(config, causal=True, dropout=0.0)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.cross_attention = CrossAttention(config)
        self.cross_attention_norm = nn.LayerNorm(config.hidden, eps=EPS)
        self.feed_forward = FeedForward(config, relu)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=EPS)

    def forward(self, x: Tensor, source: Tensor, pairs: Pairs) -> Tensor:
        """x and the result: (Nt, H); source: (Ns, H)."""
        return self._apply_sublayers(
            x, lambda y: self.attention(y, pairs.queries), lambda y: self.cross_attention(y, source, pairs)
        )

    def decode_step(self, x: Tensor, cache: BeamCache, layer: int, source: PaddedSource) -> Tensor:
        """Decode one token of each hypothesis, with the earlier ones in the cache; x and the result: (S * beams, H)."""
        attention = self.attention

        def attend(y: Tensor) -> Tensor:
            attended: Tensor = attention.output(
                cache.attend(layer, attention.query(y), attention.key(y), attention.value(y))
            )
            return attended

        return self._apply_sublayers(x, attend, lambda y: self.cross_attention.decode_step(y, source))

    def _apply_sublayers(self, x: Tensor, attend: Sublayer, attend_to_source: Sublayer) -> Tensor:
        x = self.add(x, self.attention_norm, attend)
        x = self.add(x, self.cross_attention_norm, attend_to_source)
        return self.add(x, self.feed_forward_norm, self.feed_forward)
