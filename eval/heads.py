"""A pretrained encoder with a new head for a task."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eval.encode import Encoded
from eval.tasks import Task
from pretrain.keyed import key_of
from pretrain.models import Model
from pretrain.models.albert import Albert
from pretrain.models.bert import Bert
from pretrain.models.gpt import GPT
from pretrain.models.gpt2 import GPT2
from pretrain.models.inputs import on_device
from pretrain.objectives.batch import Inputs, layout


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

    def forward(self, input_ids: Tensor, positions: Tensor, bounds: Tensor, longest: int, asked_at: Tensor) -> Tensor:
        """What the head says of each question.

        Args:
            input_ids, positions, bounds, longest: B sequences as the model's `encode` takes them.
            asked_at: int64 (W,), which of all pieces are words' first ones; read when tagging.

        Returns:
            float (B, classes), (B, 1) for regression, (W, labels) for tagging.
        """
        hidden = self.encoder.encode(input_ids, positions, bounds, longest)
        if self.kind == "tagging":
            state = hidden.index_select(0, asked_at)
        elif isinstance(self.encoder, GPT | GPT2):
            state = hidden.index_select(0, bounds[1:] - 1)
        else:
            state = hidden.index_select(0, bounds[:-1])
            if isinstance(self.encoder, Bert | Albert):
                state = self.encoder.pool(state)
        out: Tensor = self.head(self.dropout(state))
        return out


def collate(examples: Sequence[Encoded], device: torch.device) -> dict[str, Any]:
    """Inputs of `TaskModel.forward`: the examples one behind the other."""
    lengths = [len(example.ids) for example in examples]
    starts = np.cumsum([0, *lengths[:-1]])
    asked_at = np.concatenate([start + example.asked_at for start, example in zip(starts, examples, strict=True)])
    input_ids = np.concatenate([example.ids for example in examples])
    inputs: Inputs = {"input_ids": input_ids, "asked_at": asked_at, **layout(lengths)}
    return on_device(inputs, device)
