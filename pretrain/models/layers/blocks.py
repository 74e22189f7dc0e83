"""The building blocks of the families."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from multihop.pretrain.models.config import AttentionConfig, StackConfig, distances
from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.packed_tokens import PackedTokens

Activation = Callable[[Tensor], Tensor]
gelu: Activation = F.gelu
"""GELU (Hendrycks and Gimpel 2016)."""
gelu_tanh: Activation = partial(F.gelu, approximate="tanh")
"""The tanh approximation of GELU."""
relu: Activation = F.relu


class SelfAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), with relative positions or without."""

    def __init__(
        self, config: AttentionConfig, causal: bool, dropout: float | None = None, max_distance: int | None = None
    ) -> None:
        """Make the projections.

        Args:
            dropout: rate of the attention weights; None: that of the config.
            max_distance: of relative positions; None: there are none.
        """
        super().__init__()
        self.heads, self.causal = config.heads, causal
        self.dropout = config.dropout if dropout is None else dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)
        self.distance: nn.Linear | None = None
        if max_distance is not None:
            # Its rows are the embeddings of the clipped distances, which the heads share (Shaw et al. 2018, 3.3).
            count = distances(max_distance, causal)
            self.distance = nn.Linear(config.hidden // config.heads, count, bias=False)

    def forward(self, x: Tensor, sequences: Sequences, token_indices: Tensor | None = None) -> Tensor:
        """x: (N, H); the result: (N, H), or (M, H) of the tokens at `token_indices`."""
        query, key, value = (project(x).view(len(x), self.heads, -1) for project in (self.query, self.key, self.value))
        relative = None if self.distance is None else self.distance(query)
        dropout = self.dropout if self.training else 0.0
        attended = attend(query, key, value, sequences, self.causal, dropout, relative).flatten(1)
        return self.output(select_tokens(attended, token_indices))


class FeedForward(nn.Module):
    """Two projections with an activation between them (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: AttentionConfig, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (N, H)."""
        return self.down(self.activation(self.up(x)))


class PostNormLayer(nn.Module):
    """A post-norm block: the norm follows the residual sum (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: StackConfig, causal: bool, activation: Activation, eps: float) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal, max_distance=config.max_distance)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=eps)
        self.feed_forward = FeedForward(config, activation)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sequences: Sequences, token_indices: Tensor | None = None) -> Tensor:
        """x: (N, H); the result: (N, H), or (M, H) of the tokens at `token_indices`."""
        x = self.attention_norm(
            select_tokens(x, token_indices) + self.dropout(self.attention(x, sequences, token_indices))
        )
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class PreNormLayer(nn.Module):
    """A pre-norm block: the norms precede attention and feed-forward (Radford et al. 2019, section 2.3)."""

    def __init__(self, config: StackConfig, causal: bool, activation: Activation, eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=eps)
        self.attention = SelfAttention(config, causal, max_distance=config.max_distance)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=eps)
        self.feed_forward = FeedForward(config, activation)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sequences: Sequences, token_indices: Tensor | None = None) -> Tensor:
        """x: (N, H); the result: (N, H), or (M, H) of the tokens at `token_indices`."""
        x = select_tokens(x, token_indices) + self.dropout(
            self.attention(self.attention_norm(x), sequences, token_indices)
        )
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def select_tokens(x: Tensor, token_indices: Tensor | None) -> Tensor:
    """(N, H) -> (M, H): the rows at `token_indices`, int64 (M,); None: all."""
    return x if token_indices is None else x.index_select(0, token_indices)


def apply_layers(layers: Iterable[nn.Module], x: Tensor, sequences: Sequences, token_indices: Tensor | None) -> Tensor:
    """x (N, H) through all layers: (N, H), or (M, H) of the tokens at `token_indices`, int64 (M,).

    What follows the attention of the last layer is computed for these tokens only. It is three quarters of
    its matrix products but for the attention scores, and few of its outputs are used where 15 % of the tokens are
    masked, or one token represents a text.
    """
    *inner, last = layers
    for layer in inner:
        x = layer(x, sequences)
    hidden: Tensor = last(x, sequences, token_indices)
    return hidden


def embed(table: nn.Embedding, ids: Tensor, sparse_lookup_grad: bool) -> Tensor:
    """Embeddings (N, H) of ids, int64 (N,).

    Args:
        sparse_lookup_grad: the weight is the output matrix too and gets a dense gradient from there. On a CPU the
            gradient of the lookup is then sparse: its few rows are added to the dense one instead of a second dense
            one.
    """
    return F.embedding(ids, table.weight, sparse=sparse_lookup_grad and ids.device.type == "cpu")


def position_embedding(config: StackConfig) -> nn.Embedding | None:
    """Absolute positions, learned; None where positions are relative."""
    return None if config.positions == "relative" else nn.Embedding(config.max_positions, config.embedding_width)


def embed_at(
    word: nn.Embedding, position: nn.Embedding | None, packed: PackedTokens[Tensor], sparse_lookup_grad: bool
) -> Tensor:
    """Embeddings (N, E) of tokens, and of their absolute positions where the model has them.

    Args:
        sparse_lookup_grad: as in `embed`.
    """
    x = embed(word, packed.input_ids, sparse_lookup_grad)
    return x if position is None else x + position(packed.positions)
