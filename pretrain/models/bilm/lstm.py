"""LSTM with a projected state (Sak et al. 2014) and clipped cells and projections, over packed sequences.

    i, f, g, o = W x + U r' + b
    c = clip(sigmoid(f + 1) c' + sigmoid(i) tanh(g))
    r = clip(P (sigmoid(o) tanh(c)))

where r' and c' are the state before. torch's LSTM has the projection, but clips nothing. All products that need no
state are done at once, before or after the steps, as in the family seq2seq.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from multihop.pretrain.models.bilm.config import BilmConfig
from multihop.pretrain.models.seq2seq.time_steps import TimeSteps
from multihop.pretrain.uncompiled import uncompiled

FORGET_BIAS = 1.0
"""Is added to the forget gate, as by TensorFlow's cell: the state is kept at the beginning of training, when biases are
zero."""
State = tuple[Tensor, Tensor]
"""The projected state r, (S, P), and the cells c, (S, C)."""


class ProjectedLstm(nn.Module):
    """One direction of a layer: C cells, projected to P outputs; gates in torch's order."""

    def __init__(self, config: BilmConfig, reverse: bool) -> None:
        """Create the weights.

        Args:
            reverse: read each sequence from its last token to its first.
        """
        super().__init__()
        cells, width = config.lstm_width, config.hidden // 2
        self.reverse = reverse
        self.cell_clip = math.inf if config.cell_clip is None else config.cell_clip
        self.projection_clip = math.inf if config.projection_clip is None else config.projection_clip
        self.input_weight = nn.Parameter(torch.empty(4 * cells, width))
        self.state_weight = nn.Parameter(torch.empty(4 * cells, width))
        self.bias = nn.Parameter(torch.empty(4 * cells))
        self.projection = nn.Parameter(torch.empty(width, cells))

    @uncompiled  # its loop would be compiled again for each batch's lengths
    def forward(self, x: Tensor, steps: TimeSteps, state: State | None = None) -> tuple[Tensor, State]:
        """Run over all time steps.

        Args:
            x: (N, P), in the order of `steps`.
            state: the state before the first step, in the rows of `steps`; None: zeros.

        Returns:
            (N, P), the projected state at each position; each sequence's last state.
        """
        width, cells = self.projection.shape
        if state is None:
            sequences = len(steps.sorted_indices)
            state = x.new_zeros(sequences, width), x.new_zeros(sequences, cells)
        forget = torch.zeros_like(self.bias).unflatten(0, (4, cells))
        forget[1] = FORGET_BIAS
        out, r, c = _ProjectedLstm.apply(
            x,
            *state,
            self.input_weight,
            self.state_weight,
            self.bias + forget.flatten(),
            self.projection,
            (self.cell_clip, self.projection_clip),
            steps,
            self.reverse,
        )
        return out, (r, c)


class BilmLayer(nn.Module):
    """A layer of the forward and the backward language model, which do not see each other's states."""

    def __init__(self, config: BilmConfig, has_skip_connection: bool) -> None:
        super().__init__()
        self.has_skip_connection = has_skip_connection
        self.directions = nn.ModuleList(ProjectedLstm(config, reverse) for reverse in (False, True))

    def forward(self, x: Tensor, steps: TimeSteps, states: list[State] | None = None) -> Tensor:
        """x and the result are (N, 2 * P), packed: the states of the forward model, then those of the backward one.

        Args:
            states: those before each sequence, of each direction; None: zeros.
        """
        return self.run(x, steps, [None, None] if states is None else states)[0]

    def run(self, x: Tensor, steps: TimeSteps, states: list[State] | list[None]) -> tuple[Tensor, list[State]]:
        """The same, and the states after each sequence. The rows of states are the sequences in their order."""
        outputs, last = [], []
        for direction, half, state in zip(self.directions, x.chunk(2, 1), states, strict=True):
            initial = None if state is None else _reordered(state, steps.sorted_indices)
            out, after = direction(half.index_select(0, steps.order), steps, initial)
            outputs.append(out.index_select(0, steps.inverse_order))
            last.append(_reordered(after, steps.unsorted_indices))
        joined = torch.cat(outputs, 1)
        return (x + joined if self.has_skip_connection else joined), last


def _reordered(state: State, rows: Tensor) -> State:
    return state[0].index_select(0, rows), state[1].index_select(0, rows)


class _ProjectedLstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        r: Tensor,
        c: Tensor,
        input_weight: Tensor,
        state_weight: Tensor,
        bias: Tensor,
        projection: Tensor,
        clips: tuple[float, float],
        steps: TimeSteps,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width, cell_width = projection.shape
        cell_clip, projection_clip = clips
        # With `out`, because selective checkpointing keeps the outputs of products, and these are changed in place.
        gates = torch.addmm(bias, x, input_weight.T, out=x.new_empty(len(x), 4 * cell_width))
        out, cells = x.new_empty(len(x), width), x.new_empty(len(x), cell_width)
        last_r, last_c = r.clone(), c.clone()
        for at in steps.slices[::-1] if reverse else steps.slices:
            count, step_gates = at.stop - at.start, gates[at]
            torch.addmm(step_gates, last_r[:count], state_weight.T, out=step_gates)
            step_gates[:, : 2 * cell_width].sigmoid_()
            step_gates[:, 2 * cell_width : 3 * cell_width].tanh_()
            step_gates[:, 3 * cell_width :].sigmoid_()
            i, f, g, o = step_gates.chunk(4, 1)
            cells[at] = last_c[:count].mul_(f).addcmul_(i, g).clamp_(-cell_clip, cell_clip)
            torch.mm(cells[at].tanh().mul_(o), projection.T, out=out[at])
            last_r[:count] = out[at].clamp_(-projection_clip, projection_clip)
        ctx.save_for_backward(x, r, c, input_weight, state_weight, projection, gates, cells, out)
        ctx.steps, ctx.reverse, ctx.clips = steps, reverse, clips
        return out, last_r, last_c

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, r, c, input_weight, state_weight, projection, gates, cells, out = ctx.saved_tensors
        steps, cell_width = ctx.steps, cells.shape[1]
        cell_clip, projection_clip = ctx.clips
        before = steps.after if ctx.reverse else steps.before
        i, f, g, o = gates.chunk(4, 1)
        tanh = cells.tanh()
        # The factors of the cell's gradient (for o: of the output's) in each gate's gradient, by which the loop
        # multiplies it.
        grad_gates = torch.empty_like(gates)
        grad_i, grad_f, grad_g, grad_o = grad_gates.chunk(4, 1)
        torch.mul(g, i * (1 - i), out=grad_i)
        torch.mul(torch.cat([c, cells]).index_select(0, before), f * (1 - f), out=grad_f)
        torch.mul(i, 1 - g * g, out=grad_g)
        torch.mul(tanh, o * (1 - o), out=grad_o)
        outputs = tanh * o
        cell_factor = tanh.square_().neg_().add_(1).mul_(o)
        # A clipped value has no gradient; one that equals the bound counts as clipped.
        cell_passes, projection_passes = cells.abs() < cell_clip, out.abs() < projection_clip
        grad_projected = torch.empty_like(out)
        grad_r, grad_c = gradients[1].clone(), gradients[2].clone()
        for at in steps.slices if ctx.reverse else steps.slices[::-1]:
            count, step_grad = at.stop - at.start, grad_gates[at]
            step_r, step_c = grad_r[:count].add_(gradients[0][at]), grad_c[:count]
            torch.mul(step_r, projection_passes[at], out=grad_projected[at])
            step_output = grad_projected[at] @ projection
            step_c.addcmul_(step_output, cell_factor[at]).mul_(cell_passes[at])
            step_grad[:, : 3 * cell_width].unflatten(1, (3, cell_width)).mul_(step_c[:, None])
            step_grad[:, 3 * cell_width :].mul_(step_output)
            step_c.mul_(f[at])
            torch.mm(step_grad, state_weight, out=step_r)
        states = torch.cat([r, out]).index_select(0, before)
        grad_x = grad_gates @ input_weight if ctx.needs_input_grad[0] else None
        weights = grad_gates.T @ x, grad_gates.T @ states, grad_gates.sum(0), grad_projected.T @ outputs
        return grad_x, grad_r, grad_c, *weights, None, None, None
