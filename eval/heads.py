"""A pretrained encoder with a new head for a task."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from eval.encode import Encoded
from eval.tasks import Task
from pretrain.keyed import key_of
from pretrain.models import Model
from pretrain.models.bert import Bert


class TaskModel(nn.Module):
    """The encoder, dropout, and one linear layer (Devlin et al. 2018, section 4; Radford et al. 2018, section 3.2)."""

    def __init__(self, encoder: Model, task: Task, seed: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.kind = task.kind
        self.dropout = nn.Dropout(encoder.config.dropout)
        self.head = nn.Linear(encoder.config.hidden, len(task.labels) or 1)
        generator = torch.Generator().manual_seed(key_of("head", seed) >> 1)
        nn.init.normal_(self.head.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, lengths: Tensor, asked_at: Tensor) -> Tensor:
        """What the head says of each question.

        Args:
            input_ids: int64 (B, T).
            lengths: int64 (B,), pieces of each sequence.
            asked_at: int64 (W,), positions of words' first pieces in the flattened (B*T,); read when tagging.

        Returns:
            float (B, classes), (B, 1) for regression, (W, labels) for tagging.
        """
        hidden = self.encoder.encode(input_ids, None, lengths)
        if self.kind == "tagging":
            state = hidden.flatten(0, 1).index_select(0, asked_at)
        elif isinstance(self.encoder, Bert):
            state = self.encoder.pool(hidden)
        else:
            state = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
        out: Tensor = self.head(self.dropout(state))
        return out


def collate(examples: Sequence[Encoded], device: torch.device) -> dict[str, Tensor]:
    """Inputs of `TaskModel.forward`, padded to the longest of the examples."""
    lengths = np.array([len(example.ids) for example in examples], np.int64)
    longest = int(lengths.max())
    # Padding is never attended to, so that any id does.
    input_ids = np.zeros((len(examples), longest), np.int64)
    for line, example in enumerate(examples):
        input_ids[line, : lengths[line]] = example.ids
    asked_at = np.concatenate([line * longest + example.asked_at for line, example in enumerate(examples)])
    arrays = {"input_ids": input_ids, "lengths": lengths, "asked_at": asked_at}
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
