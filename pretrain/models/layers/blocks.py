"""The building blocks of the families."""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, bfloat16, float16, nn
from torch.nn import functional as F

from multihop.pretrain.models.config import AttentionConfig, StackConfig, num_relative_distances
from multihop.pretrain.models.cpu.dropout import Dropout
from multihop.pretrain.models.gpu import can_run
from multihop.pretrain.models.layers.attention import Sequences, attend
from multihop.pretrain.models.layers.rotary import Rotation, rotate
from multihop.pretrain.packed_tokens import PackedTokens

Activation = Callable[[Tensor], Tensor]
gelu_tanh: Activation = partial(F.gelu, approximate="tanh")
"""The tanh approximation of GELU."""
relu: Activation = F.relu


def gelu(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016)."""
    if x.dtype in (bfloat16, float16) and can_run(x):
        from multihop.pretrain.models.gpu.gelu import fused_gelu  # needs Triton

        return fused_gelu(x)
    return F.gelu(x)


class SelfAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2), with relative or rotary positions or without."""

    def __init__(
        self,
        config: AttentionConfig,
        causal: bool,
        dropout: float | None = None,
        max_distance: int | None = None,
        window: int | None = None,
        bias: bool = True,
    ) -> None:
        """Create the projections.

        Args:
            dropout: the dropout rate of the attention weights; None: the rate in `config`.
            max_distance: the maximum distance of relative positions; None: the module has none.
            window: as in `attention.attend`.
            bias: whether the projections have biases.
        """
        super().__init__()
        self.heads, self.causal, self.window = config.heads, causal, window
        self.dropout = config.dropout if dropout is None else dropout
        self.query = nn.Linear(config.hidden, config.hidden, bias)
        self.key = nn.Linear(config.hidden, config.hidden, bias)
        self.value = nn.Linear(config.hidden, config.hidden, bias)
        self.output = nn.Linear(config.hidden, config.hidden, bias)
        self.distance: nn.Linear | None = None
        if max_distance is not None:
            # Its rows are the embeddings of the clipped distances, which the heads share (Shaw et al. 2018, 3.3).
            count = num_relative_distances(max_distance, causal)
            self.distance = nn.Linear(config.hidden // config.heads, count, bias=False)

    def forward(
        self,
        x: Tensor,
        sequences: Sequences,
        token_indices: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """x is (N, H); the result is (N, H), or (M, H) for the tokens at `token_indices`.

        Args:
            rotation: the rotation of queries and keys by their positions; None: they are not rotated.
        """
        query, key, value = (project(x).view(len(x), self.heads, -1) for project in (self.query, self.key, self.value))
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        relative = None if self.distance is None else self.distance(query)
        dropout = self.dropout if self.training else 0.0
        attended = attend(query, key, value, sequences, self.causal, dropout, relative, self.window).flatten(1)
        return self.output(select_tokens(attended, token_indices))


class FeedForward(nn.Module):
    """Two projections with an activation between them (Vaswani et al. 2017, section 3.3)."""

    def __init__(self, config: AttentionConfig, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(config.hidden, config.intermediate)
        self.down = nn.Linear(config.intermediate, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are (N, H)."""
        return self.down(self.activation(self.up(x)))


class DropoutAddNorm(nn.LayerNorm):
    """The layer norm of the sum of a residual and an input after dropout."""

    def forward(self, x: Tensor, residual: Tensor, dropout: Dropout) -> Tensor:  # type: ignore[override]
        """The norm of residual + dropout(x), of (N, H) each."""
        if can_run(x):
            from multihop.pretrain.models.gpu.dropout_add_norm import dropout_add_norm  # needs Triton

            rate = dropout.rate if dropout.training else 0.0
            return dropout_add_norm(x, residual, self.weight, self.bias, self.eps, rate)
        return super().forward(residual + dropout(x))


class PostNormLayer(nn.Module):
    """A post-norm block: the norm follows the residual sum (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: StackConfig, causal: bool, activation: Activation, eps: float) -> None:
        super().__init__()
        self.attention = SelfAttention(config, causal, max_distance=config.max_distance)
        self.attention_norm = DropoutAddNorm(config.hidden, eps=eps)
        self.feed_forward = FeedForward(config, activation)
        self.feed_forward_norm = DropoutAddNorm(config.hidden, eps=eps)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, sequences: Sequences, token_indices: Tensor | None = None) -> Tensor:
        """x is (N, H); the result is (N, H), or (M, H) for the tokens at `token_indices`."""
        attended = self.attention(x, sequences, token_indices)
        x = self.attention_norm(attended, select_tokens(x, token_indices), self.dropout)
        return self.feed_forward_norm(self.feed_forward(x), x, self.dropout)


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
        """x is (N, H); the result is (N, H), or (M, H) for the tokens at `token_indices`."""
        x = select_tokens(x, token_indices) + self.dropout(
            self.attention(self.attention_norm(x), sequences, token_indices)
        )
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


def select_tokens(x: Tensor, token_indices: Tensor | None) -> Tensor:
    """(N, H) -> (M, H): the rows at `token_indices`, int64 (M,); None selects all."""
    return x if token_indices is None else x.index_select(0, token_indices)


def apply_layers(layers: Iterable[nn.Module], x: Tensor, sequences: Sequences, token_indices: Tensor | None) -> Tensor:
    """Apply all layers to x (N, H); returns (N, H), or (M, H) for the tokens at `token_indices`, int64 (M,).

    In the last layer, what follows its attention is computed for these tokens only. That is three quarters of its
    matrix products, attention scores aside, and few of its outputs are used where 15 % of the tokens are masked, or
    one token represents a text.
    """
    *inner, last = layers
    for layer in inner:
        x = layer(x, sequences)
    hidden: Tensor = last(x, sequences, token_indices)
    return hidden


def embed(table: nn.Embedding, ids: Tensor, sparse_lookup_grad: bool) -> Tensor:
    """Embeddings (N, H) of ids, int64 (N,).

    Args:
        sparse_lookup_grad: whether the weight is also the output matrix, from which it gets a dense gradient. On a CPU
            the lookup's gradient is then sparse: its few rows are added to the dense one, instead of a second dense
            gradient.
    """
    return F.embedding(ids, table.weight, sparse=sparse_lookup_grad and table.weight.device.type == "cpu")


def position_embedding(config: StackConfig) -> nn.Embedding | None:
    """Learned absolute position embeddings; None where positions are relative."""
    return None if config.positions == "relative" else nn.Embedding(config.max_positions, config.embedding_width)


def embed_with_positions(
    word: nn.Embedding, position: nn.Embedding | None, packed: PackedTokens[Tensor], sparse_lookup_grad: bool
) -> Tensor:
    """The sum (N, E) of the embeddings of tokens and of their absolute positions, if the model has them.

    Args:
        sparse_lookup_grad: as in `embed`.
    """
    x = embed(word, packed.input_ids, sparse_lookup_grad)
    return x if position is None else x + position(packed.positions)
