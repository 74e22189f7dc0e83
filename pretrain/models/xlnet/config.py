"""XLNet (Yang et al. 2019)."""

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from multihop.common.errors import UserError
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, AttentionConfig, OutputBias, WordInit
from multihop.pretrain.models.family import Family, sizes


class XlnetConfig(AttentionConfig):
    """The recipe's `model` section with `family: xlnet`."""

    family: Annotated[Literal["xlnet"], SIZES] = "xlnet"
    max_positions: Annotated[int, SIZES] = Field(default=512, ge=1)
    """Length of the longest sequence, in tokens. No weight depends on it: positions are relative."""
    word_init: WordInit = "random"
    output_bias: OutputBias = "zeros"

    @model_validator(mode="after")
    def _sinusoids_need_an_even_width(self) -> "XlnetConfig":
        if self.hidden % 2:
            raise UserError(
                f"hidden={self.hidden} is odd, and the encodings of relative positions are pairs of a sine and a "
                "cosine; set an even number"
            )
        return self

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`. The last layer's content stream ends with its keys and values; a sequence has
        predictions in proportion to its length."""
        hidden, tokens, squares = self.hidden, float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
        outputs = hidden**2 + 2 * hidden * self.intermediate
        distances = 2 * int(lengths.max(initial=1)) - 1
        keys = 2 * tokens * hidden**2 + distances * hidden**2
        # A query has a product with each key, each value and each of the distances, which are twice as many as keys.
        content = tokens * (hidden**2 + outputs) + 4 * squares * hidden
        queries = predicted * (hidden**2 + outputs) + 4 * predicted * squares / max(tokens, 1.0) * hidden
        stack = self.layers * (keys + queries) + (self.layers - 1) * content
        return 2 * TRAINING_FACTOR * (stack + predicted * hidden * vocab_size)


FAMILY = Family(
    display_name="XLNet",
    config=XlnetConfig,
    model_class="Xlnet",
    causal=False,
    pooling="last",
    objectives=("plm",),
    auto_class="AutoModelForCausalLM",
    has_token_types=True,
    cls_last=True,
    presets={
        # The published configurations; section 3.1 has the large one.
        "xlnet-base": sizes(12, 768, 12, 512),
        "xlnet-large": sizes(24, 1024, 16, 512),
    },
)
