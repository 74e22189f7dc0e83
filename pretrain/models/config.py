"""The recipe's `model` section."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from multihop.common.config import COMPATIBILITY, FINE_TUNING, LOGGING, MEMORY, UPDATES, ZERO_SHOT, Section
from multihop.common.errors import UserError
from multihop.pretrain.models.families import FAMILIES, PRESETS

_SIZES = COMPATIBILITY | MEMORY | FINE_TUNING | ZERO_SHOT


def _is_null(value: Any) -> bool:
    """A key that only some families have is written down with these alone: trials and checkpoints of the others keep
    the hashes that they had before it."""
    return value is None


class ModelConfig(Section):
    """A model's architecture. `preset` names a published size; any field given beside it overrides the preset's."""

    preset: Annotated[str | None, LOGGING] = None
    family: Annotated[str, _SIZES]
    """The architecture: a folder of pretrain/models."""
    layers: Annotated[int, _SIZES] = Field(ge=1)
    """Translating families: of the encoder, and as many of the decoder."""
    hidden: Annotated[int, _SIZES] = Field(ge=1)
    """Width of the residual stream; seq2seq: of the decoder's states, and of both directions of the encoder's."""
    embedding: Annotated[int, _SIZES] = Field(ge=1)
    """Width of the embeddings; default `hidden`. Only families with a factorized embedding have another."""
    heads: Annotated[int, _SIZES] = Field(ge=1)
    intermediate: Annotated[int, _SIZES] = Field(ge=1)
    """Width between the two projections of a feed-forward block; default 4 * `hidden`."""
    max_positions: Annotated[int, _SIZES] = Field(ge=1)
    """The longest sequence, in tokens."""
    dropout: Annotated[float, UPDATES | MEMORY | FINE_TUNING] = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout rate after the embeddings, of the attention weights, and after every block's projections. transformer:
    not of the attention weights, as published; seq2seq: of the inputs of each layer and of the output."""
    output_bias: Annotated[Literal["zeros", "unigram"], UPDATES] = "zeros"
    """Initial bias of the output layer over the vocabulary. unigram: the log of each token's frequency in the training
    text, so that training begins at the unigram model's loss and its first steps are not spent on learning it.
    With `init_from`, only for a Hugging Face model without this layer."""
    word_init: Annotated[Literal["random", "cooccurrences"], UPDATES] = "random"
    """Initial token embeddings. cooccurrences: vectors of length 1 by which tokens occur together in the training text,
    computed before training begins. Rare tokens get better embeddings from little text, and fine-tuning with them. Not
    with `init_from`, whose model has them."""
    attention_init: Annotated[Literal["random", "neighbours"], UPDATES | FINE_TUNING] = "random"
    """neighbours: the position embeddings begin as sinusoids, and each head of the first layer attends to the tokens 1,
    2, … positions before or after each token. Small masked models learn from far fewer tokens with it. With `init_from`
    it applies only to the random weights that evaluation compares with."""
    norm: Annotated[Literal["post", "pre"] | None, _SIZES] = Field(default=None, exclude_if=_is_null)
    """Where the layer norms of a transformer are. post: after each residual sum, as published; pre: before each
    sublayer, with one more at the end of encoder and decoder (Xiong et al. 2020), which trains without warm-up."""
    positions: Annotated[Literal["sinusoidal", "learned", "relative"] | None, _SIZES] = Field(
        default=None, exclude_if=_is_null
    )
    """Position embeddings. transformer: sinusoidal (fixed, as published) or learned; the families of one stack: null
    (learned, as published) or relative (of distances in each layer's attention, Shaw et al. 2018)."""
    max_distance: Annotated[int | None, _SIZES] = Field(default=None, ge=1, exclude_if=_is_null)
    """Of relative positions, in tokens: farther tokens count as this far; default 16, where they are relative."""
    cell: Annotated[Literal["lstm", "gru"] | None, _SIZES] = Field(default=None, exclude_if=_is_null)
    """Of a seq2seq model: LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""
    attention: Annotated[Literal["none", "additive", "dot", "general", "concat"] | None, _SIZES] = Field(
        default=None, exclude_if=_is_null
    )
    """How the decoder of a seq2seq model attends to the source. none: only its last state is passed on (Sutskever et
    al. 2014); additive: Bahdanau et al. 2015; dot, general and concat: Luong et al. 2015."""
    input_feeding: Annotated[bool | None, _SIZES] = Field(default=None, exclude_if=_is_null)
    """Whether the attentional state is part of the decoder's next input (Luong et al. 2015, section 3.3)."""
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
            raise UserError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
        filled = {**(PRESETS[preset] if preset else {}), **given}
        family = FAMILIES.get(str(filled.get("family")))
        if family is not None:
            filled = {**dict.fromkeys(family.lacks, 1), **filled}
            filled |= {key: values[0] for key, values in family.options.items() if filled.get(key) is None}
        if filled.get("positions") == "relative" and filled.get("max_distance") is None:
            filled["max_distance"] = 16  # Shaw et al. 2018, section 4.1
        if isinstance(filled.get("hidden"), int):
            filled.setdefault("intermediate", 4 * filled["hidden"])
            filled.setdefault("embedding", filled["hidden"])
        return filled

    @field_validator("family")
    @classmethod
    def _family_is_known(cls, family: str) -> str:
        if family not in FAMILIES:
            raise UserError(f"unknown family {family!r}; known are {', '.join(FAMILIES)}")
        return family

    @model_validator(mode="after")
    def _has_the_keys(self) -> "ModelConfig":
        family = FAMILIES[self.family]
        for key in dict.fromkeys(key for each in FAMILIES.values() for key in each.options):
            value = getattr(self, key)
            if value is not None and value not in family.options.get(key, ()):
                having = " or ".join(name for name, each in FAMILIES.items() if value in each.options.get(key, ()))
                raise UserError(
                    f"{key}={value}: family={self.family} has no such choice; remove it, or set family={having}"
                )
        for key in family.lacks:
            if getattr(self, key) != 1:
                raise UserError(f"{key}={getattr(self, key)}: family={self.family} has no {key}; remove it")
        if self.max_distance is not None and self.positions != "relative":
            raise UserError(
                f"max_distance={self.max_distance} is for relative positions, and positions={self.positions}; remove "
                "it, or set positions=relative"
            )
        if self.word_init != "random" and family.translates:
            raise UserError(
                f"word_init={self.word_init}: family={self.family} is trained on pairs, and this is for texts of one "
                "language; remove it"
            )
        return self

    @model_validator(mode="after")
    def _feeds_a_context(self) -> "ModelConfig":
        if self.input_feeding and self.attention in ("none", "additive"):
            why = "has no attentional state" if self.attention == "none" else "feeds its context to the cell already"
            raise UserError(
                f"input_feeding=true: attention={self.attention} {why}; remove it, or set attention=dot, general or "
                "concat"
            )
        return self

    @model_validator(mode="after")
    def _has_the_bias(self) -> "ModelConfig":
        if self.output_bias != "zeros" and not FAMILIES[self.family].has_output_bias:
            having = " or ".join(name for name, family in FAMILIES.items() if family.has_output_bias)
            raise UserError(
                f"output_bias={self.output_bias}: family={self.family} has no bias in its output layer; remove it, or "
                f"set family={having}"
            )
        return self

    @model_validator(mode="after")
    def _attends_in_both_directions(self) -> "ModelConfig":
        family = FAMILIES[self.family]
        if self.attention_init != "random" and (family.causal or family.translates):
            both = " or ".join(name for name, each in FAMILIES.items() if not each.causal and not each.translates)
            what = "is causal" if family.causal else "is an encoder and a decoder"
            raise UserError(
                f"attention_init={self.attention_init}: family={self.family} {what}, and this is for masked models, "
                f"which see the tokens on both sides; remove it, or set family={both}"
            )
        if self.attention_init != "random" and self.positions == "relative":
            raise UserError(
                f"attention_init={self.attention_init} begins with position embeddings, and positions=relative has "
                "none; remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _widths_fit(self) -> "ModelConfig":
        if self.cell is not None and self.hidden % 2:
            raise UserError(f"hidden={self.hidden} is odd, and is divided among two directions; change it")
        if self.hidden % self.heads:
            raise UserError(f"hidden={self.hidden} is not a multiple of heads={self.heads}; change one of them")
        if self.embedding != self.hidden and not FAMILIES[self.family].factorized_embedding:
            factorized = " or ".join(name for name, family in FAMILIES.items() if family.factorized_embedding)
            raise UserError(
                f"embedding={self.embedding} differs from hidden={self.hidden}, and family={self.family} has no "
                f"projection between the two; set them equal, or family={factorized}"
            )
        return self
