"""The recipe's `model` section."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from common.config import FINE_TUNING, MEANING, MEMORY, NOTHING, UPDATES, ZERO_SHOT, Section
from pretrain.models.families import FAMILIES, PRESETS


class ModelConfig(Section):
    """A Transformer. `preset` names a published size; any field given beside it overrides the preset's."""

    preset: Annotated[str | None, NOTHING] = None
    family: Annotated[str, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT]
    """The architecture: a folder of pretrain/models."""
    layers: Annotated[int, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT] = Field(ge=1)
    hidden: Annotated[int, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT] = Field(ge=1)
    """Width of the residual stream."""
    embedding: Annotated[int, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT] = Field(ge=1)
    """Width of the embeddings; default `hidden`. Only families with a factorized embedding have another."""
    heads: Annotated[int, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT] = Field(ge=1)
    intermediate: Annotated[int, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT] = Field(ge=1)
    """Width between the two projections of a feed-forward block; default 4 * `hidden`."""
    max_positions: Annotated[int, MEANING | MEMORY | FINE_TUNING | ZERO_SHOT] = Field(ge=1)
    """The longest sequence, in tokens."""
    dropout: Annotated[float, UPDATES | MEMORY | FINE_TUNING] = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout rate after the embeddings, of the attention weights, and after every block's projections."""
    output_bias: Annotated[Literal["zeros", "unigram"], UPDATES] = "zeros"
    """Initial bias of the output layer over the vocabulary. unigram: the log of each token's frequency in the training
    text, so that training begins at the unigram model's loss and its first steps are not spent on learning it."""
    word_init: Annotated[Literal["random", "cooccurrences"], UPDATES] = "random"
    """Initial token embeddings. cooccurrences: vectors of length 1 by which tokens occur together in the training text,
    computed before training begins. Rare tokens get better embeddings from little text, and fine-tuning with them."""
    attention_init: Annotated[Literal["random", "neighbours"], UPDATES | FINE_TUNING] = "random"
    """neighbours: the position embeddings begin as sinusoids, and each head of the first layer attends to the tokens 1,
    2, … positions before or after each token. Small masked models learn from far fewer tokens with it."""
    init_from: Annotated[str | None, UPDATES] = None
    """Where to take the initial weights from: a run's directory (its newest checkpoint), a checkpoint, or a directory
    with Hugging Face's config.json and model.safetensors; null: random initialisation."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = given.get("preset")
        if preset is not None and str(preset) not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
        filled = {**(PRESETS[preset] if preset else {}), **given}
        if isinstance(filled.get("hidden"), int):
            filled.setdefault("intermediate", 4 * filled["hidden"])
            filled.setdefault("embedding", filled["hidden"])
        return filled

    @field_validator("family")
    @classmethod
    def _family_is_known(cls, family: str) -> str:
        if family not in FAMILIES:
            raise ValueError(f"unknown family {family!r}; known are {', '.join(FAMILIES)}")
        return family

    @model_validator(mode="after")
    def _has_the_bias(self) -> "ModelConfig":
        if self.output_bias != "zeros" and not FAMILIES[self.family].has_output_bias:
            having = " or ".join(name for name, family in FAMILIES.items() if family.has_output_bias)
            raise ValueError(
                f"output_bias={self.output_bias}: family={self.family} has no bias in its output layer; remove it, or "
                f"set family={having}"
            )
        return self

    @model_validator(mode="after")
    def _attends_in_both_directions(self) -> "ModelConfig":
        if self.attention_init != "random" and FAMILIES[self.family].causal:
            both = " or ".join(name for name, family in FAMILIES.items() if not family.causal)
            raise ValueError(
                f"attention_init={self.attention_init}: family={self.family} is causal, and this is for models that "
                f"see the tokens on both sides; remove it, or set family={both}"
            )
        return self

    @model_validator(mode="after")
    def _widths_fit(self) -> "ModelConfig":
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them")
        if self.embedding != self.hidden and not FAMILIES[self.family].factorized_embedding:
            factorized = " or ".join(name for name, family in FAMILIES.items() if family.factorized_embedding)
            raise ValueError(
                f"embedding={self.embedding} differs from hidden={self.hidden}, and family={self.family} has no "
                f"projection between the two; set them equal, or family={factorized}"
            )
        return self
