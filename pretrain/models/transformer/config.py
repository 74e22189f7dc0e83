"""The Transformer (Vaswani et al. 2017)."""

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, AttentionConfig, OutputBias
from multihop.pretrain.models.family import Family, sizes


class TransformerConfig(AttentionConfig):
    """The recipe's `model` section with `family: transformer`."""

    family: Annotated[Literal["transformer"], SIZES] = "transformer"
    norm: Annotated[Literal["post", "pre"], SIZES] = "post"
    """Position of the layer norms. post: after each residual sum, as published; pre: before each sublayer, with one
    more at the end of encoder and decoder (Xiong et al. 2020), which trains without warm-up."""
    positions: Annotated[Literal["sinusoidal", "learned"], SIZES] = "sinusoidal"
    """Position embeddings: sinusoidal (fixed, as published) or learned."""
    output_bias: OutputBias = "zeros"

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        assert source_lengths is not None, "a translating family reads sources"
        source, target = source_lengths.astype(np.float64), lengths.astype(np.float64)
        hidden, feed_forward = self.hidden, 2 * self.hidden * self.intermediate
        # Four projections of each token in each attention; keys and values of cross-attention are the source's.
        encoder = source.sum() * (4 * hidden**2 + feed_forward)
        decoder = target.sum() * (6 * hidden**2 + feed_forward) + source.sum() * 2 * hidden**2
        scores = (source**2).sum() + 0.5 * (target**2).sum() + (source * target).sum()
        layers = float(self.layers * (encoder + decoder + 2 * hidden * scores))
        return 2 * TRAINING_FACTOR * (layers + float(target.sum()) * hidden * vocab_size)


FAMILY = Family(
    display_name="Transformer",
    config=TransformerConfig,
    model_class="Transformer",
    causal=False,
    pooling="last",
    objectives=("translation",),
    auto_class="AutoModelForSeq2SeqLM",
    translates=True,
    presets={
        "transformer-tiny": sizes(2, 128, 4, 512, intermediate=512),
        "transformer-mini": sizes(3, 256, 4, 512, intermediate=1024),
        # Vaswani et al. 2017, table 3.
        "transformer-base": sizes(6, 512, 8, 512, intermediate=2048),
        "transformer-big": sizes(6, 1024, 16, 512, intermediate=4096, dropout=0.3),
    },
)
