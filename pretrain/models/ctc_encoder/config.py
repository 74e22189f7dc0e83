"""An encoder trained by connectionist temporal classification (Graves et al. 2006)."""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from multihop.common.errors import UserError
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, ModelConfig
from multihop.pretrain.models.family import Family
from multihop.pretrain.models.seq2seq.config import Seq2SeqConfig
from multihop.pretrain.models.transformer.config import TransformerConfig


class CtcEncoderConfig(ModelConfig):
    """The recipe's `model` section with `family: ctc-encoder`."""

    family: Annotated[Literal["ctc-encoder"], SIZES] = "ctc-encoder"
    encoder: Annotated[Literal["lstm", "gru", "transformer"], SIZES] = "lstm"
    """lstm and gru: that of seq2seq, bidirectional, each direction half as wide as `hidden`; transformer: that of
    transformer, with norms before each sublayer."""
    heads: Annotated[int | None, SIZES] = Field(default=None, ge=1)
    """Attention heads of a layer, with `encoder: transformer`."""
    intermediate: Annotated[int | None, SIZES] = Field(default=None, ge=1)
    """Width between the two projections of a feed-forward block; default 4 * `hidden` with `encoder: transformer`."""

    @model_validator(mode="after")
    def _encoder_is_possible(self) -> "CtcEncoderConfig":
        is_transformer = self.encoder == "transformer"
        if is_transformer and self.heads is None:
            raise UserError("encoder=transformer needs heads; set it to a divisor of hidden")
        for name in ("heads", "intermediate"):
            if not is_transformer and (value := getattr(self, name)) is not None:
                raise UserError(f"{name}={value} is for encoder=transformer, not {self.encoder}; remove it")
        _ = self.layer_config  # refuses sizes that the layers cannot have
        return self

    @property
    def layer_config(self) -> Seq2SeqConfig | TransformerConfig:
        """The config of the family whose encoder layers these are."""
        sizes: dict[str, Any] = {key: getattr(self, key) for key in ("layers", "hidden", "max_positions", "dropout")}
        if self.encoder != "transformer":
            return Seq2SeqConfig(**sizes, cell=self.encoder)
        if self.intermediate is not None:
            sizes["intermediate"] = self.intermediate
        return TransformerConfig.model_validate({**sizes, "heads": self.heads, "norm": "pre"})

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`. The encoder is counted as in its family; every token of the source has
        logits."""
        assert source_lengths is not None, "a translating family reads sources"
        none = np.zeros_like(lengths)
        encoder = self.layer_config.train_flops(vocab_size, none, 0, source_lengths)
        if self.encoder == "transformer":  # without the keys and values of cross-attention
            encoder -= 2 * TRAINING_FACTOR * float(source_lengths.sum()) * self.layers * 2 * self.hidden**2
        else:  # without the keys of attention
            encoder -= 2 * TRAINING_FACTOR * float(source_lengths.sum()) * self.hidden**2
        return encoder + 2 * TRAINING_FACTOR * float(source_lengths.sum()) * self.hidden * vocab_size


FAMILY = Family(
    display_name="CTC encoder",
    config=CtcEncoderConfig,
    model_class="CtcEncoder",
    causal=False,
    pooling="last",
    objectives=("ctc",),
    auto_class=None,
    translates=True,
    uses_ctc=True,
    presets={
        # Graves et al. 2006, section 5.2, have 100 cells in each of the two directions of one layer.
        "ctc-graves": {"layers": 1, "hidden": 200, "max_positions": 512, "encoder": "lstm", "dropout": 0.0},
        "ctc-mini": {"layers": 2, "hidden": 256, "max_positions": 512, "encoder": "lstm", "dropout": 0.2},
    },
)
