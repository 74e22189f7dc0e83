"""The backward AWD-LSTM of ULMFiT (Howard and Ruder 2018, section 3.3, Bidirectional language model)."""

from typing import Annotated, Literal

from multihop.pretrain.models.awd_lstm.config import AwdConfig
from multihop.pretrain.models.config import SIZES
from multihop.pretrain.models.family import Family


class AwdLstmBackwardConfig(AwdConfig):
    """The recipe's `model` section with `family: awd-lstm-backward`."""

    family: Annotated[Literal["awd-lstm-backward"], SIZES] = "awd-lstm-backward"


FAMILY = Family(
    display_name="backward AWD-LSTM",
    config=AwdLstmBackwardConfig,
    model_class="AwdLstmBackward",
    causal=False,
    pooling="first",
    objectives=("clm",),
    auto_class=None,
    reads_backward=True,
)
