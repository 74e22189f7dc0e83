"""The recurrent encoder-decoder (Sutskever et al. 2014), with attention (Bahdanau et al. 2015; Luong et al. 2015)."""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from multihop.common.errors import UserError
from multihop.pretrain.models.config import SIZES, TRAINING_FACTOR, ModelConfig, OutputBias
from multihop.pretrain.models.family import Family

_GATES = {"lstm": 4, "gru": 3}


class Seq2SeqConfig(ModelConfig):
    """The recipe's `model` section with `family: seq2seq`."""

    family: Annotated[Literal["seq2seq"], SIZES] = "seq2seq"
    cell: Annotated[Literal["lstm", "gru"], SIZES] = "lstm"
    """LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al. 2014)."""
    attention: Annotated[Literal["general", "dot", "concat", "additive", "none"], SIZES] = "general"
    """How the decoder attends to the source. general, dot and concat: Luong et al. 2015; additive: Bahdanau et al.
    2015; none: only the encoder's last state is passed on (Sutskever et al. 2014)."""
    input_feeding: Annotated[bool, SIZES] = False
    """Whether the attentional state is part of the decoder's next input (Luong et al. 2015, section 3.3)."""
    output_bias: OutputBias = "zeros"

    @model_validator(mode="after")
    def _feeds_an_attentional_state(self) -> "Seq2SeqConfig":
        if self.input_feeding and self.attention in ("none", "additive"):
            why = "has no attentional state" if self.attention == "none" else "feeds its context to the cell already"
            raise UserError(
                f"input_feeding=true: attention={self.attention} {why}; remove it, or set attention=dot, general or "
                "concat"
            )
        return self

    @model_validator(mode="after")
    def _two_directions_divide_hidden(self) -> "Seq2SeqConfig":
        if self.hidden % 2:
            raise UserError(
                f"hidden={self.hidden} is odd, and the two directions of the encoder need half of it each; make it even"
            )
        return self

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
        hidden, gates = self.hidden, _GATES[self.cell]
        # Two directions of half the width: inputs H to 2 * H / 2, states H / 2 to H / 2 twice.
        encoder = source.sum() * self.layers * gates * (hidden**2 + hidden**2 / 2)
        input_feeds = self.input_feeding or self.attention == "additive"
        decoder = target.sum() * gates * hidden**2 * (2 * self.layers + (1 if input_feeds else 0))
        attention = 0.0
        if self.attention != "none":
            attention = 2 * hidden * (source * target).sum()  # scores and contexts
            attention += source.sum() * (0 if self.attention == "dot" else hidden**2)
            attention += target.sum() * (hidden**2 if self.attention in ("additive", "concat") else 0)
            attention += target.sum() * hidden**2 * (6 if self.attention == "additive" else 2)
        recurrence = float(encoder + decoder + attention)
        return 2 * TRAINING_FACTOR * (recurrence + float(target.sum()) * hidden * vocab_size)


def _sizes(layers: int, hidden: int, **others: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "max_positions": 512, **others}


FAMILY = Family(
    display_name="seq2seq",
    config=Seq2SeqConfig,
    model_class="Seq2Seq",
    causal=False,
    pooling="last",
    objectives=("translation",),
    auto_class=None,
    translates=True,
    presets={
        "seq2seq-mini": _sizes(2, 256, dropout=0.2),
        # Luong et al. 2015, section 4.1; their encoder reads in one direction, and its width is that of both here.
        "seq2seq-luong": _sizes(4, 1000, dropout=0.2, attention="general", input_feeding=True),
        # Bahdanau et al. 2015, A.2.1: each direction of their encoder is as wide as the decoder, which is half of it
        # here, and their embeddings have 620.
        "seq2seq-bahdanau": _sizes(1, 1000, dropout=0.0, cell="gru", attention="additive"),
        # Sutskever et al. 2014, section 3.4; their encoder reads the reversed source in one direction.
        "seq2seq-sutskever": _sizes(4, 1000, dropout=0.0, attention="none"),
    },
)
