"""The recipe's `model` section: the keys of all families, and those of the families with one stack of layers.

Each family's own class, in pretrain/models/FAMILY/config.py, derives from these, and adds or narrows keys.
"""

from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from multihop.common.config import COMPATIBILITY, FINE_TUNING, LOGGING, MEMORY, UPDATES, ZERO_SHOT, Effect, Section
from multihop.common.errors import UserError

SIZES: Effect = COMPATIBILITY | MEMORY | FINE_TUNING | ZERO_SHOT
"""The effects of a key on which the weights' shapes or the model's equations depend."""

OutputBias = Annotated[Literal["zeros", "unigram"], UPDATES]
"""The type of the key `output_bias` of families whose output layer over the vocabulary has a bias."""

WordInit = Annotated[Literal["random", "cooccurrences"], UPDATES]
"""The type of the key `word_init` of families with one stack of layers."""

TRAINING_FACTOR = 3
"""A forward and a backward pass take three times the operations of a forward pass."""


class ModelConfig(Section):
    """A model's architecture. `preset` names a published size; any other field overrides the preset's."""

    preset: Annotated[str | None, LOGGING] = None
    """The name of a published size."""
    family: Annotated[str, SIZES]
    """The architecture: a folder of pretrain/models."""
    layers: Annotated[int, SIZES] = Field(ge=1)
    """Number of layers; for a translating family, of the encoder and of the decoder each."""
    hidden: Annotated[int, SIZES] = Field(ge=1)
    """Width of the residual stream; seq2seq: of the decoder's states, and of the encoder's two directions together;
    awd-lstm: of the states of all layers but the last."""
    max_positions: Annotated[int, SIZES] = Field(ge=1)
    """Length of the longest sequence, in tokens."""
    dropout: Annotated[float, UPDATES | MEMORY | FINE_TUNING] = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout rate after the embeddings, of the attention weights, and after every block's projections. transformer:
    not of the attention weights, as published; seq2seq: of the inputs of each layer and of the output; awd-lstm: of the
    output alone."""
    init_from: Annotated[str | None, UPDATES] = None
    """Source of the initial weights: a run's directory (its newest checkpoint), a checkpoint, or a directory with
    Hugging Face's config.json and model.safetensors; null: random initialization."""

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings; families with a factorized embedding have a separate key for it."""
        return self.hidden

    @property
    def state_widths(self) -> list[int]:
        """The width of each of `Model.hidden_states`: of the embeddings' output, and of each layer's."""
        return [self.hidden] * (self.layers + 1)

    @property
    def state_width(self) -> int:
        """Width of the hidden states that `Model.encode` returns."""
        return self.state_widths[-1]

    @property
    def num_layer_groups(self) -> int:
        """The number of groups in `Model.layer_groups`, for families with one stack of layers."""
        return self.layers + 2

    def with_dropout(self, rate: float) -> Self:
        """The same model with another dropout rate, for fine-tuning.

        Raises:
            UserError: a rate of the family that follows from it is not less than 1.
        """
        return self.model_copy(update={"dropout": rate})

    @property
    def needs_token_counts(self) -> bool:
        """Whether initial weights are computed from the token frequencies of the training text."""
        return getattr(self, "output_bias", None) == "unigram"

    @property
    def needs_word_vectors(self) -> bool:
        """Whether initial embeddings are computed from the token co-occurrences of the training text."""
        return getattr(self, "word_init", None) == "cooccurrences"

    @property
    def untrainable(self) -> str | None:
        """Why a model with these keys can be evaluated but not trained, and what to do; None: it can be trained."""
        return None

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """Floating-point operations of a forward and backward pass, counted from shapes.

        A multiply-add counts as two. Recomputed activations are not counted, nor are operations other than matrix
        products (Narayanan et al. 2021, section 5.1; Chowdhery et al. 2022, appendix B).

        Args:
            vocab_size: the size of the output layer.
            lengths: int64 (S,), tokens of each sequence; for a translating family, of each target with its start token.
            predicted: number of tokens for which logits are computed.
            source_lengths: int64 (S,), tokens of each source with its end token; translating families only.

        Raises:
            UserError: The family does not implement it.
        """
        raise UserError(
            f"model.family={self.family} does not implement train_flops, which MFU and plans are computed from; "
            f"implement it in pretrain/models/{self.family.replace('-', '_')}/config.py"
        )


class AttentionConfig(ModelConfig):
    """A family whose layers have attention and feed-forward blocks."""

    heads: Annotated[int, SIZES] = Field(ge=1)
    """Attention heads of a layer."""
    intermediate: Annotated[int, SIZES] = Field(default_factory=lambda others: 4 * others.get("hidden", 1), ge=1)
    """Width between the two projections of a feed-forward block; default 4 * `hidden`."""

    def causal_windows(self) -> list[int | None]:
        """For each layer of a causal stack, the number of tokens before a token that it attends to; None: all."""
        return [None] * self.layers

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> "AttentionConfig":
        if self.hidden % self.heads:
            raise UserError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them")
        return self


class StackConfig(AttentionConfig):
    """A family with one stack of layers."""

    word_init: WordInit = "random"
    """Initial token embeddings. cooccurrences: vectors of length 1 from the token co-occurrences of the training text,
    computed before training begins. With little text, rare tokens get better embeddings, which also helps fine-tuning.
    Not with `init_from`, whose model has embeddings."""
    positions: Annotated[Literal["learned", "relative"], SIZES] = "learned"
    """Position embeddings. learned: absolute, as published; relative: embeddings of distances in each layer's attention
    (Shaw et al. 2018)."""
    max_distance: Annotated[int | None, SIZES] = Field(default=None, ge=1)
    """Maximum distance of relative positions, in tokens: larger distances are clipped to it; default 16 with
    `positions: relative`, null without."""

    @model_validator(mode="before")
    @classmethod
    def _fill_max_distance(cls, content: Any) -> Any:
        if isinstance(content, dict) and content.get("positions") == "relative" and not content.get("max_distance"):
            return {**content, "max_distance": content.get("max_distance", 16)}  # Shaw et al. 2018, section 4.1
        return content

    @model_validator(mode="after")
    def _distance_is_relative(self) -> "StackConfig":
        if self.max_distance is not None and self.positions != "relative":
            raise UserError(
                f"max_distance={self.max_distance} is for relative positions, and positions={self.positions}; remove "
                "it, or set positions=relative"
            )
        return self

    def _stack_multiply_adds(self, lengths: NDArray[np.int64], last_tokens: float, causal: bool) -> float:
        """Multiply-adds of the layers in a forward pass, without embeddings and heads.

        Args:
            last_tokens: number of tokens whose states the last layer computes after its keys and values.
        """
        hidden = self.hidden
        tokens, pairs = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
        inputs, outputs = 3 * hidden**2, hidden**2 + 2 * hidden * self.intermediate
        projections = self.layers * tokens * inputs + ((self.layers - 1) * tokens + last_tokens) * outputs
        # Under a causal mask a token attends to half of the others.
        attention = 2 * pairs * hidden * (0.5 if causal else 1.0)
        if self.max_distance is not None:
            attention += tokens * hidden * num_relative_distances(self.max_distance, causal)
        return projections + self.layers * attention


class EncoderConfig(StackConfig):
    """A family with one bidirectional stack, trained on masked tokens."""

    output_bias: OutputBias = "zeros"
    """Initial bias of the output layer over the vocabulary. unigram: the log of each token's frequency in the training
    text, so that training begins at the unigram model's loss and its first steps are not spent on learning it.
    With `init_from`, only for a Hugging Face model without this layer."""
    attention_init: Annotated[Literal["random", "neighbors"], UPDATES | FINE_TUNING] = "random"
    """neighbors: the position embeddings begin as sinusoids, and each head of the first layer attends to the tokens 1,
    2, … positions before or after each token. Small masked models learn from far fewer tokens with it. With `init_from`
    it applies only to the random weights that evaluation compares with."""

    @model_validator(mode="after")
    def _neighbors_have_positions(self) -> "EncoderConfig":
        if self.attention_init != "random" and self.positions == "relative":
            raise UserError(
                f"attention_init={self.attention_init} begins with position embeddings, and positions=relative has "
                "none; remove one of the two"
            )
        return self

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`. The last layer is computed for predicted and first tokens only."""
        stack = self._stack_multiply_adds(lengths, predicted + len(lengths), causal=False)
        head = predicted * self.embedding_width * (vocab_size + self.hidden)
        return 2 * TRAINING_FACTOR * (stack + head)


class CausalConfig(StackConfig):
    """A family with one causal stack, trained on the next token."""

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        stack = self._stack_multiply_adds(lengths, float(lengths.sum()), causal=True)
        return 2 * TRAINING_FACTOR * (stack + predicted * self.hidden * vocab_size)


def num_relative_distances(max_distance: int, causal: bool) -> int:
    """Number of different clipped distances under relative positions: -max_distance to max_distance, or to 0."""
    return max_distance + 1 if causal else 2 * max_distance + 1
