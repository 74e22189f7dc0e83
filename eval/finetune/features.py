"""The input of a head on a frozen model: hidden states, combined, and with a BiLSTM over them or without.

Devlin et al. 2018, section 5.3 and table 7.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from multihop.eval.config import Features

UNITS, DEPTH = 768, 2
"""Units in each direction, and layers, of the BiLSTM (section 5.3)."""


class FeatureReader(nn.Module):
    """The part that is trained between a frozen model and a task's linear layer.

    Attributes:
        width: size of the vectors that it returns.
    """

    def __init__(self, features: Features, layers: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.indexes, self.combine = features.indexes(layers), features.combine
        self.width = hidden * (len(self.indexes) if self.combine == "concat" else 1)
        if self.combine == "mix":
            self.mix = nn.Parameter(torch.zeros(len(self.indexes)))
            self.scale = nn.Parameter(torch.ones(()))
        self.lstm: nn.LSTM | None = None
        if features.head == "bilstm":
            self.lstm = nn.LSTM(self.width, UNITS, DEPTH, bidirectional=True)
            self.width = 2 * UNITS
            for parameter in self.lstm.parameters():
                # torch's own bound, drawn with the trial's seed.
                nn.init.uniform_(parameter, -(UNITS**-0.5), UNITS**-0.5, generator=generator)

    def forward(self, states: list[Tensor], cu_seqlens: Tensor) -> Tensor:
        """(N, width) of packed sequences.

        Args:
            states: the model's hidden states, (N, H) each.
            cu_seqlens: int64 (S + 1,), cumulative sequence lengths, from 0 to N.
        """
        x = self._combined([states[i] for i in self.indexes])
        if self.lstm is None:
            return x
        sequences = x.split(cu_seqlens.diff().tolist())
        return torch.cat(unpack_sequence(self.lstm(pack_sequence(sequences, enforce_sorted=False))[0]))

    def _combined(self, chosen: list[Tensor]) -> Tensor:
        if self.combine == "concat":
            return torch.cat(chosen, 1)
        stacked = torch.stack(chosen)
        if self.combine == "sum":
            return stacked.sum(0)
        return self.scale * torch.einsum("l,lnh->nh", self.mix.softmax(0), stacked)
