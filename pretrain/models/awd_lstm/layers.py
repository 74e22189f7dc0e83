"""A weight-dropped LSTM layer, dropout with one mask a sequence, segments of random lengths (Merity et al. 2018)."""

from itertools import pairwise
from random import Random

import torch
from torch import Tensor, nn, zeros

from multihop.pretrain.device_type import device_type
from multihop.pretrain.models.cpu.dropout import keep_mask, keep_probability
from multihop.pretrain.models.seq2seq.recurrence import State, Weights, run_recurrence, run_recurrence_cudnn
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps
from multihop.pretrain.uncompiled import uncompiled

_GATES = 4
_FULL_LENGTH_PROBABILITY, _LENGTH_STD, _MIN_LENGTH = 0.95, 5.0, 5
"""The values of section 5 and, of the shortest length, of the authors' code."""


class WeightDropLstm(nn.Module):
    """One LSTM layer whose recurrent weights have dropout (section 2); the weights are as in torch.nn.LSTM."""

    def __init__(self, inputs: int, width: int, weight_dropout: float) -> None:
        super().__init__()
        self.width, self.weight_dropout = width, weight_dropout
        self.input_weight = nn.Parameter(torch.empty(_GATES * width, inputs))
        self.state_weight = nn.Parameter(torch.empty(_GATES * width, width))
        self.input_bias = nn.Parameter(zeros(_GATES * width))
        self.state_bias = nn.Parameter(zeros(_GATES * width))

    @uncompiled
    def forward(
        self, x: Tensor, steps: TimeSteps, state: State | None = None, bounds: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Run all time steps, with one mask of the recurrent weights.

        Args:
            x: (N, I), in the order of `steps`.
            state: h and c before the first step, (S, W) each, in the rows of `steps`; None: zeros.
            bounds: from `segment_bounds`: the state is detached before each of these time steps; None: full
                backpropagation through time.

        Returns:
            (N, W), the output h at each position; each sequence's last state, in the rows of `steps`.
        """
        if state is None:
            zero = x.new_zeros(len(steps.sorted_indices), self.width)
            state = zero, zero
        state_weight: Tensor = self.state_weight
        if self.training and self.weight_dropout:
            state_weight = state_weight * scaled_mask(state_weight.shape, self.weight_dropout, state_weight)
        weights = self.input_weight, state_weight, self.input_bias, self.state_bias
        if bounds is None:
            return _run(x, steps, state, weights)
        outs = []
        for start, stop in pairwise([0, *bounds.tolist(), len(steps.batch_sizes)]):
            part, rows = steps.part(start, stop)
            running = part.batch_sizes[0]
            out, last = _run(x[rows], part, tuple(each[:running].detach() for each in state), weights)
            outs.append(out)
            state = tuple(torch.cat([new, old[running:]]) for new, old in zip(last, state, strict=True))
        return torch.cat(outs), state


def _run(x: Tensor, steps: TimeSteps, state: State, weights: Weights) -> tuple[Tensor, State]:
    if device_type(x.device) == "cuda":
        out, [last] = run_recurrence_cudnn("lstm", x, steps, [state], [weights])
        return out, last
    return run_recurrence("lstm", x, steps, state, weights, reverse=False)


@uncompiled
def segment_bounds(time_steps: int, base: int) -> Tensor:
    """int64, ascending: the first time steps of all segments but the first.

    A segment's length is normally distributed around `base` with a standard deviation of 5, around half of it with
    probability 0.05, and at least 5.
    """
    # Of integers alone, which are on the CPU also where a plan runs the model without data.
    random = Random(int(torch.empty((), dtype=torch.int64).random_()))
    bounds: list[int] = []
    while True:
        around = base if random.random() < _FULL_LENGTH_PROBABILITY else base / 2
        bound = (bounds[-1] if bounds else 0) + max(_MIN_LENGTH, int(random.gauss(around, _LENGTH_STD)))
        if bound >= time_steps:
            return torch.tensor(bounds, dtype=torch.int64)
        bounds.append(bound)


def scaled_mask(shape: torch.Size | tuple[int, ...], rate: float, like: Tensor) -> Tensor:
    """A mask of a shape, 0 with probability `rate` and else the inverse of the probability of staying, of the type and
    on the device of `like`; drawn as `keep_mask` draws."""
    return keep_mask(torch.Size(shape), rate, like.device).to(like.dtype) / keep_probability(rate)


def variational_dropout(x: Tensor, rate: float, rows: Tensor, sequences: int) -> Tensor:
    """Dropout with one mask for all tokens of a sequence (Gal and Ghahramani 2016).

    Args:
        x: (N, W), in any order.
        rows: int64 (N,), the sequence of each token.
        sequences: S.
    """
    return x * scaled_mask((sequences, x.shape[1]), rate, x).index_select(0, rows)
