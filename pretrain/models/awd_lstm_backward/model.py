"""The backward AWD-LSTM of ULMFiT (Howard and Ruder 2018, section 3.3, Bidirectional language model)."""

from multihop.pretrain.models.awd_lstm.model import AwdLstm
from multihop.pretrain.models.awd_lstm_backward.config import AwdLstmBackwardConfig


class AwdLstmBackward(AwdLstm):
    """The same layers, which read each sequence from its last token to its first and predict the token before."""

    config: AwdLstmBackwardConfig
    reads_backward = True
