"""AWD-LSTM (Merity et al. 2018), the language model of ULMFiT (Howard and Ruder 2018), in both directions."""

from itertools import pairwise
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from multihop.common.config import FINE_TUNING, MEMORY, UPDATES
from multihop.common.errors import UserError
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, ModelConfig, OutputBias
from multihop.pretrain.models.family import Family

_GATES = 4
_CLASSIFIER_RATES = {"dropout": 0.4, "hidden_dropout": 0.3, "input_dropout": 0.4, "embedding_dropout": 0.05}
_CLASSIFIER_RATES |= {"weight_dropout": 0.5}
"""The rates of the classifier (Howard and Ruder 2018, section 4.1)."""

Rate = Annotated[float, UPDATES | MEMORY | FINE_TUNING]


class AwdConfig(ModelConfig):
    """The keys of both directions. The default dropout rates are those of the language model in the published code of
    Howard and Ruder (2018), before its multiplier."""

    embedding: Annotated[int, SIZES] = Field(default_factory=lambda others: others.get("hidden", 1), ge=1)
    """Width of the embeddings and of the last layer's states, which are multiplied by the embeddings at the output;
    default `hidden`, which is the width of the other layers."""
    input_dropout: Rate = Field(default=0.25, ge=0.0, lt=1.0)
    """Dropout rate of the first layer's input, with one mask for all tokens of a sequence (Merity et al. 2018, section
    4.2)."""
    hidden_dropout: Rate = Field(default=0.15, ge=0.0, lt=1.0)
    """The same between the layers. `dropout` is the rate of the last layer's output, before the output layer or, in
    fine-tuning, the head."""
    embedding_dropout: Rate = Field(default=0.02, ge=0.0, lt=1.0)
    """Share of the vocabulary whose embeddings are zero in a micro-batch (section 4.3)."""
    weight_dropout: Rate = Field(default=0.2, ge=0.0, lt=1.0)
    """Dropout rate of the recurrent weights, with one mask for all tokens of a step (section 2)."""
    alpha: Annotated[float, UPDATES] = Field(default=2.0, ge=0.0)
    """Weight in the training loss of the mean square of the output after dropout (section 4.6)."""
    beta: Annotated[float, UPDATES] = Field(default=1.0, ge=0.0)
    """Weight of the mean square of the differences between the last layer's states of adjacent tokens."""
    bptt: Annotated[int | None, UPDATES] = Field(default=None, ge=5)
    """Base length, in tokens, of the segments of truncated backpropagation through time in language modeling: each is
    drawn from N(bptt, 5), or with probability 0.05 from N(bptt / 2, 5), and is at least 5 (section 4.1). null: the
    whole sample."""
    output_bias: OutputBias = "zeros"

    @property
    def embedding_width(self) -> int:
        """See `ModelConfig.embedding_width`."""
        return self.embedding

    @property
    def state_widths(self) -> list[int]:
        """See `ModelConfig.state_widths`."""
        return [self.embedding, *[self.hidden] * (self.layers - 1), self.embedding]

    def with_dropout(self, rate: float) -> Self:
        """See `ModelConfig.with_dropout`; the other rates are to `dropout` as those of the paper's classifier."""
        rates = {key: round(rate * each / _CLASSIFIER_RATES["dropout"], 6) for key, each in _CLASSIFIER_RATES.items()}
        highest = max(rates, key=lambda key: rates[key])
        if rates[highest] >= 1:
            raise UserError(
                f"dropout={rate}: {highest}, which grows with it, would be {rates[highest]:g}, and a rate is less than "
                f"1; lower it to less than {rate / rates[highest]:g}"
            )
        return self.model_copy(update=rates)

    def train_flops(
        self,
        vocab_size: int,
        lengths: NDArray[np.int64],
        predicted: int,
        source_lengths: NDArray[np.int64] | None = None,
    ) -> float:
        """See `ModelConfig.train_flops`."""
        gates = sum(_GATES * width * (inputs + width) for inputs, width in pairwise(self.state_widths))
        return 2 * TRAINING_FACTOR * (float(lengths.sum()) * gates + float(predicted) * self.embedding * vocab_size)


class AwdLstmConfig(AwdConfig):
    """The recipe's `model` section with `family: awd-lstm`."""

    family: Annotated[Literal["awd-lstm"], SIZES] = "awd-lstm"


FAMILY = Family(
    display_name="AWD-LSTM",
    config=AwdLstmConfig,
    model_class="AwdLstm",
    causal=True,
    pooling="last",
    objectives=("clm",),
    auto_class=None,
    presets={
        # Merity et al. 2018, section 5; Howard and Ruder 2018, section 4.1.
        "awd-lstm": {"layers": 3, "hidden": 1150, "embedding": 400, "max_positions": 512, "dropout": 0.1},
    },
)
