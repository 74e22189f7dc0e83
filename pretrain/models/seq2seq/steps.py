"""Packed sequences in the order of a recurrence: all first tokens, then all second ones, and so on."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from multihop.pretrain.models.layers.attention import Sequences


@dataclass(frozen=True)
class Steps:
    """S sequences, the longest first, step by step: at step t the first sizes[t] of them still have a token."""

    order: Tensor
    """int64 (N,): the token of the packed sequences at each position of this order."""
    back: Tensor
    """int64 (N,): the position of each token in this order."""
    longest_first: Tensor
    """int64 (S,): the sequence at each row of this order."""
    rows: Tensor
    """int64 (S,): the row of each sequence in this order."""
    sizes: tuple[int, ...]
    """(T,): not growing; their sum is N."""

    @cached_property
    def slices(self) -> list[slice]:
        """The positions of each step."""
        bounds = [0]
        for size in self.sizes:
            bounds.append(bounds[-1] + size)
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    @cached_property
    def before(self) -> Tensor:
        """int64 (N,): the row of the state before each position, in the S initial states followed by all others."""
        return self._neighbour([None, *self.slices])

    @cached_property
    def after(self) -> Tensor:
        """The same for a recurrence that reads backwards."""
        return self._neighbour([*self.slices[1:], None])

    def _neighbour(self, others: list[slice | None]) -> Tensor:
        sequences, rows_before = len(self.rows), []
        for size, other in zip(self.sizes, others, strict=False):
            rows = torch.arange(size)
            if other is not None:
                there = other.stop - other.start
                rows[:there] = rows[:there] + (sequences + other.start)
            rows_before.append(rows)
        return torch.cat(rows_before).to(self.order.device)


def steps_of(sequences: Sequences) -> Steps:
    """Packed sequences step by step."""
    lengths = sequences.cu_seqlens.diff()
    longest_first = lengths.argsort(descending=True, stable=True)
    rows = torch.empty_like(longest_first)
    rows[longest_first] = torch.arange(len(rows), device=rows.device)
    positions = torch.arange(sequences.tokens, device=rows.device) - sequences.cu_seqlens[:-1].repeat_interleave(
        lengths
    )
    order = (positions * len(rows) + rows.repeat_interleave(lengths)).argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return Steps(order, back, longest_first, rows, tuple(positions.bincount().tolist()))
