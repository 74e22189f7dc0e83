"""A bag of word vectors (Mikolov et al. 2013)."""

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from multihop.common.config import COMPATIBILITY, ZERO_SHOT
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, ModelConfig, OutputBias, WordInit
from multihop.pretrain.models.family import Family


class BagConfig(ModelConfig):
    """The recipe's `model` section with `family: bag`."""

    family: Annotated[Literal["bag"], SIZES] = "bag"
    layers: Annotated[Literal[0], SIZES] = 0
    window: Annotated[int, COMPATIBILITY | ZERO_SHOT] = Field(default=5, ge=1)
    """Number of tokens on each side of a masked token from which it is predicted."""
    output_bias: OutputBias = "zeros"
    """Initial bias of the output layer over the vocabulary. unigram: the log of each token's frequency in the training
    text. With `init_from` it has no effect."""
    word_init: WordInit = "random"
    """Initial token embeddings. cooccurrences: vectors of length 1 from the token co-occurrences of the training
    text."""

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        return 2.0 * TRAINING_FACTOR * predicted * self.hidden * (vocab_size + self.hidden)


FAMILY = Family(
    display_name="bag of word vectors",
    config=BagConfig,
    model_class="Bag",
    causal=False,
    pooling="mean",
    objectives=("mlm",),
    auto_class=None,
    presets={
        # Mikolov et al. 2013, table 2: vectors of 300 dimensions.
        "bag-300": {"layers": 0, "hidden": 300, "max_positions": 512},
    },
)
