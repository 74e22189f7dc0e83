"""Token ids of tests, packed as models read them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.packed_tokens import PackedTokens, cumulative_lengths, pack


def packed(ids: Tensor, lengths: Sequence[int], token_type_ids: Tensor | None = None) -> PackedTokens[Tensor]:
    """Pack sequences of these lengths, which follow one another in `ids`, int64 (N,)."""
    types = None if token_type_ids is None else token_type_ids.numpy()
    return packed_to_device(pack(ids.numpy(), cumulative_lengths(lengths), types), torch.device("cpu"))


def sequences_of(lengths: Sequence[int]) -> Sequences:
    """Return the boundaries of sequences of these lengths."""
    return Sequences.of(packed(torch.zeros(sum(lengths), dtype=torch.int64), lengths))
