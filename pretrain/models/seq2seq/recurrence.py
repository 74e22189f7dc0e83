"""LSTM and GRU over packed sequences, as torch.nn.LSTM and GRU compute them.

On a CPU torch computes a product for the gradient of the recurrent weights at every step, and its kernels for whole
layers take no packed sequences. Here all products that need no state are done at once, before or after the steps.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from multihop.pretrain.models.seq2seq.time_steps import TimeSteps

Cell = Literal["lstm", "gru"]
GATES = {"lstm": 4, "gru": 3}
STATES = {"lstm": 2, "gru": 1}
"""Tensors of a state: h and c, or h."""
Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""The weights of inputs (G * W, I) and states (G * W, W), and a bias (G * W,) for each; gates in torch's order."""
State = tuple[Tensor, ...]
"""(S, W) each: h and c of an LSTM, h of a GRU."""


def run_recurrence(
    cell: Cell, x: Tensor, steps: TimeSteps, state: State, weights: Weights, reverse: bool
) -> tuple[Tensor, State]:
    """Run one direction of a layer over all time steps.

    Args:
        x: (N, I), in the order of `steps`.
        state: the initial state, in the rows of `steps`.
        reverse: read each sequence from its last token to its first.

    Returns:
        (N, W), the output h at each position; each sequence's last state.
    """
    if cell == "lstm":
        out, *last = _Lstm.apply(x, *state, *weights, steps, reverse)
    else:
        out, *last = _Gru.apply(x, *state, *weights, steps, reverse)
    return out, tuple(last)


def run_recurrence_cudnn(
    cell: Cell, x: Tensor, steps: TimeSteps, state: list[State], weights: list[Weights]
) -> tuple[Tensor, list[State]]:
    """Run one or both directions as `run_recurrence` does, by torch's kernel, which is cuDNN's on a GPU.

    Returns:
        (N, W) or (N, 2 * W), the outputs; the last state of each direction.
    """
    sizes = torch.tensor(steps.batch_sizes)
    flat = [part for each in weights for part in each]
    initial = [torch.stack(parts) for parts in zip(*state, strict=True)]
    settings = (flat, True, 1, 0.0, torch.is_grad_enabled(), len(weights) == 2)
    if cell == "lstm":
        out, *last = torch._VF.lstm(x, sizes, initial, *settings)
    else:
        out, *last = torch._VF.gru(x, sizes, initial[0], *settings)
    return out, list(zip(*last, strict=True))


def lstm_step(gates: Tensor, cell: Tensor) -> State:
    """One step (Hochreiter and Schmidhuber 1997; Gers et al. 2000): gates (n, 4 * W) before activation, cell (n, W)."""
    i, f, g, o = gates.chunk(4, 1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_step(inputs: Tensor, hidden: Tensor, h: Tensor) -> State:
    """One step (Cho et al. 2014): the parts of the gates from the input and from the state, (n, 3 * W); h (n, W)."""
    r, z = (inputs[:, : 2 * h.shape[1]] + hidden[:, : 2 * h.shape[1]]).sigmoid().chunk(2, 1)
    new = torch.addcmul(inputs[:, 2 * h.shape[1] :], r, hidden[:, 2 * h.shape[1] :]).tanh()
    return (torch.lerp(new, h, z),)


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        input_weight: Tensor,
        state_weight: Tensor,
        input_bias: Tensor,
        state_bias: Tensor,
        steps: TimeSteps,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = h.shape[1]
        # With `out`, because selective checkpointing keeps the outputs of products, and these are changed in place.
        gates = torch.addmm(input_bias + state_bias, x, input_weight.T, out=x.new_empty(len(x), 4 * width))
        out, cells = x.new_empty(len(x), width), x.new_empty(len(x), width)
        last_h, last_c = h.clone(), c.clone()
        for at in steps.slices[::-1] if reverse else steps.slices:
            count, step_gates = at.stop - at.start, gates[at]
            torch.addmm(step_gates, last_h[:count], state_weight.T, out=step_gates)
            step_gates[:, : 2 * width].sigmoid_()
            step_gates[:, 2 * width : 3 * width].tanh_()
            step_gates[:, 3 * width :].sigmoid_()
            i, f, g, o = step_gates.chunk(4, 1)
            cells[at] = last_c[:count].mul_(f).addcmul_(i, g)
            last_h[:count] = torch.tanh(cells[at], out=out[at]).mul_(o)
        ctx.save_for_backward(x, h, c, input_weight, state_weight, gates, cells, out)
        ctx.steps, ctx.reverse = steps, reverse
        return out, last_h, last_c

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, h, c, input_weight, state_weight, gates, cells, out = ctx.saved_tensors
        steps, width = ctx.steps, h.shape[1]
        before = steps.after if ctx.reverse else steps.before
        i, f, g, o = gates.chunk(4, 1)
        tanh = cells.tanh()
        # The factors of the cell's gradient (for o: of h's) in each gate's gradient, by which the loop multiplies it.
        grad_gates = torch.empty_like(gates)
        grad_i, grad_f, grad_g, grad_o = grad_gates.chunk(4, 1)
        torch.mul(g, i * (1 - i), out=grad_i)
        torch.mul(torch.cat([c, cells]).index_select(0, before), f * (1 - f), out=grad_f)
        torch.mul(i, 1 - g * g, out=grad_g)
        torch.mul(tanh, o * (1 - o), out=grad_o)
        cell_factor = tanh.square_().neg_().add_(1).mul_(o)
        grad_h, grad_c = gradients[1].clone(), gradients[2].clone()
        for at in steps.slices if ctx.reverse else steps.slices[::-1]:
            count, step_grad = at.stop - at.start, grad_gates[at]
            step_h, step_c = grad_h[:count].add_(gradients[0][at]), grad_c[:count]
            step_c.addcmul_(step_h, cell_factor[at])
            step_grad[:, : 3 * width].unflatten(1, (3, width)).mul_(step_c[:, None])
            step_grad[:, 3 * width :].mul_(step_h)
            step_c.mul_(f[at])
            torch.mm(step_grad, state_weight, out=step_h)
        states = torch.cat([h, out]).index_select(0, before)
        grad_bias = grad_gates.sum(0)
        grad_x = grad_gates @ input_weight if ctx.needs_input_grad[0] else None
        weights = grad_gates.T @ x, grad_gates.T @ states, grad_bias, grad_bias
        return grad_x, grad_h, grad_c, *weights, None, None


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        input_weight: Tensor,
        state_weight: Tensor,
        input_bias: Tensor,
        state_bias: Tensor,
        steps: TimeSteps,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        width = h.shape[1]
        gates = torch.addmm(input_bias, x, input_weight.T, out=x.new_empty(len(x), 3 * width))
        hidden = x.new_empty(len(x), 3 * width)
        out, last = x.new_empty(len(x), width), h.clone()
        for at in steps.slices[::-1] if reverse else steps.slices:
            count, step_gates = at.stop - at.start, gates[at]
            state_gates = torch.addmm(state_bias, last[:count], state_weight.T, out=hidden[at])
            step_gates[:, : 2 * width].add_(state_gates[:, : 2 * width]).sigmoid_()
            r, z, n = step_gates.chunk(3, 1)
            n.addcmul_(r, state_gates[:, 2 * width :]).tanh_()
            last[:count] = torch.lerp(n, last[:count], z, out=out[at])
        ctx.save_for_backward(x, h, input_weight, state_weight, gates, hidden[:, 2 * width :].contiguous(), out)
        ctx.steps, ctx.reverse = steps, reverse
        return out, last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, h, input_weight, state_weight, gates, hidden, out = ctx.saved_tensors
        steps, width = ctx.steps, h.shape[1]
        before = steps.after if ctx.reverse else steps.before
        r, z, n = gates.chunk(3, 1)
        states = torch.cat([h, out]).index_select(0, before)
        n_factor = (1 - z) * (1 - n * n)
        z_factor = (states - n) * (z * (1 - z))
        r_factor = hidden * (r * (1 - r))
        grad_gates, grad_hidden = torch.empty_like(gates), torch.empty_like(gates)
        grad_h = gradients[1].clone()
        for at in steps.slices if ctx.reverse else steps.slices[::-1]:
            each = grad_h[: at.stop - at.start].add_(gradients[0][at])
            grad_r, grad_z, grad_n = grad_gates[at].chunk(3, 1)
            torch.mul(each, n_factor[at], out=grad_n)
            torch.mul(each, z_factor[at], out=grad_z)
            torch.mul(grad_n, r_factor[at], out=grad_r)
            grad_step = grad_hidden[at]
            grad_step[:, : 2 * width] = grad_gates[at][:, : 2 * width]
            torch.mul(grad_n, r[at], out=grad_step[:, 2 * width :])
            each.mul_(z[at]).addmm_(grad_step, state_weight)
        grad_x = grad_gates @ input_weight if ctx.needs_input_grad[0] else None
        weights = grad_gates.T @ x, grad_hidden.T @ states, grad_gates.sum(0), grad_hidden.sum(0)
        return grad_x, grad_h, *weights, None, None
