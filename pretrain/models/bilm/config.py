"""Bidirectional language models of LSTMs: TagLM (Peters et al. 2017) and ELMo (Peters et al. 2018)."""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from multihop.common.config import Section
from multihop.common.errors import UserError
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, ModelConfig, OutputBias
from multihop.pretrain.models.family import Family

_Width = Annotated[int, Field(ge=1)]


class Characters(Section):
    """The encoder of words by their characters (Kim et al. 2016), as ELMo has it."""

    embedding: int = Field(default=16, ge=1)
    """Width of the embeddings of characters."""
    filters: list[tuple[_Width, _Width]] = Field(
        default=[(1, 32), (2, 32), (3, 64), (4, 128), (5, 256), (6, 512), (7, 1024)], min_length=1
    )
    """Width in characters, and number, of the convolutions of each kind."""
    highways: int = Field(default=2, ge=0)
    """Highway layers (Srivastava et al. 2015) between the convolutions and the projection."""
    max_characters: int = Field(default=50, ge=3)
    """Bytes of a word that are read, with the markers of its beginning and end; longer words are truncated."""

    @model_validator(mode="after")
    def _filters_fit_a_word(self) -> "Characters":
        if (widest := max(width for width, _ in self.filters)) > self.max_characters:
            raise UserError(
                f"filters have a width of {widest} characters, and a word has max_characters={self.max_characters}; "
                "remove the filter, or raise max_characters"
            )
        return self


class BilmConfig(ModelConfig):
    """The recipe's `model` section with `family: bilm`."""

    family: Annotated[Literal["bilm"], SIZES] = "bilm"
    hidden: Annotated[int, SIZES] = Field(ge=2)
    """Width of a layer's output, both directions together: each LSTM is projected to half of it, which is also the
    width of the token embeddings."""
    lstm_width: Annotated[int, SIZES] = Field(default_factory=lambda others: 4 * others.get("hidden", 1), ge=1)
    """Cells of each LSTM, before its projection; default 4 * `hidden`, as in ELMo."""
    skip_connections: Annotated[bool, SIZES] = True
    """Whether the output of each layer but the first is the sum of its input and its LSTM's output."""
    cell_clip: Annotated[float | None, SIZES] = Field(default=3.0, gt=0.0)
    """Bound of the absolute values of the cells; null: none."""
    projection_clip: Annotated[float | None, SIZES] = Field(default=3.0, gt=0.0)
    """Bound of the absolute values of the projections; null: none."""
    characters: Annotated[Characters | None, SIZES] = None
    """Read words by their characters, as imported weights of ELMo do; null: read tokens. A model that reads characters
    cannot be trained, because the tokens of the training text are not words."""
    output_bias: OutputBias = "zeros"

    @model_validator(mode="after")
    def _two_directions_divide_hidden(self) -> "BilmConfig":
        if self.hidden % 2:
            raise UserError(f"hidden={self.hidden} is odd, and each of the two directions has half of it; make it even")
        return self

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings, of tokens or of characters."""
        return self.hidden // 2 if self.characters is None else self.characters.embedding

    @property
    def untrainable(self) -> str | None:
        """See `ModelConfig.untrainable`."""
        if self.characters is None:
            return None
        return (
            "model.characters reads words by their characters, for imported weights, and the tokens of a training text "
            "are not words; set model.characters=null"
        )

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        width = self.hidden // 2
        lstm = 4 * self.lstm_width * (width + width) + self.lstm_width * width
        stack = float(lengths.sum()) * self.layers * 2 * lstm
        return 2 * TRAINING_FACTOR * (stack + predicted * width * vocab_size)


def _sizes(layers: int, hidden: int, lstm_width: int, **others: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "lstm_width": lstm_width, "max_positions": 512, **others}


FAMILY = Family(
    display_name="biLM",
    config=BilmConfig,
    model_class="Bilm",
    causal=False,
    pooling="mean",
    objectives=("bilm",),
    auto_class=None,
    original_checkpoint_file="options.json",
    presets={
        "bilm-mini": _sizes(2, 256, 512),
        # Peters et al. 2018, section 3.4; the options of the published weights.
        "elmo": _sizes(2, 1024, 4096, characters={}),
    },
)
