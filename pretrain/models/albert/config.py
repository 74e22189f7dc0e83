"""ALBERT (Lan et al. 2020)."""

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, EncoderConfig
from multihop.pretrain.models.family import Family, sizes


class AlbertConfig(EncoderConfig):
    """The recipe's `model` section with `family: albert`."""

    family: Annotated[Literal["albert"], SIZES] = "albert"
    embedding: Annotated[int, SIZES] = Field(default_factory=lambda others: others.get("hidden", 1), ge=1)
    """Width of the embeddings, which are projected to `hidden`; default `hidden`."""

    @property
    def embedding_width(self) -> int:
        """See `ModelConfig.embedding_width`."""
        return self.embedding

    @property
    def num_layer_groups(self) -> int:
        """See `ModelConfig.num_layer_groups`. The layers share one block."""
        return 3

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        projection = float(lengths.sum()) * self.embedding * self.hidden
        return super().train_flops(vocab_size, lengths, predicted) + 2 * TRAINING_FACTOR * projection


FAMILY = Family(
    display_name="ALBERT",
    config=AlbertConfig,
    model_class="Albert",
    causal=False,
    pooling="pooler",
    objectives=("mlm+sop", "mlm"),
    auto_class="AutoModelForPreTraining",
    has_token_types=True,
    presets={
        # Lan et al. 2020, table 1; heads as in the released models (the paper has hidden / 64 of them).
        "albert-base": sizes(12, 768, 12, 512, embedding=128),
        "albert-large": sizes(24, 1024, 16, 512, embedding=128),
        "albert-xlarge": sizes(24, 2048, 16, 512, embedding=128),
        "albert-xxlarge": sizes(12, 4096, 64, 512, embedding=128),
    },
)
