"""Packed sequences in time-major order: all first tokens, then all second ones, and so on."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from multihop.pretrain.models.layers.attention import Sequences


@dataclass(frozen=True)
class TimeSteps:
    """S sequences in time-major order, as torch.nn.utils.rnn.PackedSequence has them: sorted by length, descending."""

    order: Tensor
    """int64 (N,): the packed token at each time-major position."""
    inverse_order: Tensor
    """int64 (N,): the time-major position of each packed token."""
    sorted_indices: Tensor
    """int64 (S,): the sequence in each row, the longest first."""
    unsorted_indices: Tensor
    """int64 (S,): the row of each sequence."""
    batch_sizes: tuple[int, ...]
    """(T,): at time step t the first batch_sizes[t] sequences still have a token; their sum is N."""

    @cached_property
    def slices(self) -> list[slice]:
        """The positions of each time step."""
        bounds = [0]
        for size in self.batch_sizes:
            bounds.append(bounds[-1] + size)
        return [slice(start, stop) for start, stop in pairwise(bounds)]

    def part(self, start: int, stop: int) -> tuple["TimeSteps", slice]:
        """Return time steps `start` to `stop` as `TimeSteps` of their own, of the sequences that reach `start`, and the
        slice of their positions among all. Inputs and outputs of the part are already time-major."""
        rows = slice(self.slices[start].start, self.slices[stop - 1].stop)
        tokens = torch.arange(rows.stop - rows.start, device=self.order.device)
        running = tokens[: self.batch_sizes[start]]
        return TimeSteps(tokens, tokens, running, running, self.batch_sizes[start:stop]), rows

    @cached_property
    def before(self) -> Tensor:
        """int64 (N,): the row of the state before each position, in the S initial states followed by all others."""
        return self._adjacent_states([None, *self.slices])

    @cached_property
    def after(self) -> Tensor:
        """The same for a recurrence that reads backward."""
        return self._adjacent_states([*self.slices[1:], None])

    def _adjacent_states(self, others: list[slice | None]) -> Tensor:
        sequences, adjacent = len(self.unsorted_indices), []
        for size, other in zip(self.batch_sizes, others, strict=False):
            rows = torch.arange(size)
            if other is not None:
                count = other.stop - other.start
                rows[:count] = rows[:count] + (sequences + other.start)
            adjacent.append(rows)
        return torch.cat(adjacent).to(self.order.device)


def time_steps_of(sequences: Sequences, from_the_end: bool = False) -> TimeSteps:
    """The time-major order of packed sequences.

    Args:
        from_the_end: whether the first time step has each sequence's last token, and so on back to its first.
    """
    lengths = sequences.cu_seqlens.diff()
    sorted_indices = lengths.argsort(descending=True, stable=True)
    rows = torch.empty_like(sorted_indices)
    rows[sorted_indices] = torch.arange(len(rows), device=rows.device)
    positions = torch.arange(sequences.tokens, device=rows.device) - sequences.cu_seqlens[:-1].repeat_interleave(
        lengths
    )
    if from_the_end:
        positions = lengths.repeat_interleave(lengths) - 1 - positions
    order = (positions * len(rows) + rows.repeat_interleave(lengths)).argsort()
    inverse_order = torch.empty_like(order)
    inverse_order[order] = torch.arange(len(order), device=order.device)
    return TimeSteps(order, inverse_order, sorted_indices, rows, tuple(positions.bincount().tolist()))
