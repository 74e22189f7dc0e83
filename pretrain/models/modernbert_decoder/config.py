"""The ModernBERT decoder (Weller et al. 2025)."""

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR
from multihop.pretrain.models.family import Family
from multihop.pretrain.models.modernbert.config import ModernConfig, shared_presets


class ModernBertDecoderConfig(ModernConfig):
    """The recipe's `model` section with `family: modernbert-decoder`."""

    family: Annotated[Literal["modernbert-decoder"], SIZES] = "modernbert-decoder"

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        stack = self._multiply_adds(lengths, float(lengths.sum()), causal=True)
        return 2 * TRAINING_FACTOR * (stack + predicted * self.hidden * (vocab_size + self.hidden))


FAMILY = Family(
    display_name="ModernBERT decoder",
    config=ModernBertDecoderConfig,
    model_class="ModernBertDecoder",
    causal=True,
    pooling="last",
    objectives=("clm", "completion"),
    auto_class="AutoModelForCausalLM",
    presets=shared_presets("modernbert-decoder", "ettin-decoder"),
)
