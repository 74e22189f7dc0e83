"""What stands in for functions of torch whose kernels for GPUs the meta device lacks, or does not choose."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from multihop.pretrain.engine.deepspeed_internals import replaced

_KEPT = {"lstm": 5, "gru": 6}
"""Values for each unit and position, padding included, that cuDNN keeps of a layer for the backward pass, the gates
among them. The sizes printed in github.com/pytorch/pytorch/issues/2895, for four layers of width 320, are those of
25,000 tokens with these numbers and the outputs of all layers but the last."""


@contextmanager
def meta_kernels() -> Iterator[None]:
    """Replace these functions until the block ends."""
    with (
        replaced(functional, scaled_dot_product_attention=_fused_attention, ctc_loss=_ctc_loss),
        replaced(torch._VF, **{cell: partial(_run_recurrence, cell) for cell in _KEPT}),
    ):
        yield


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """torch's function of that name with the fused kernel, which it does not choose on the meta device."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = attend(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return out


class _CtcLoss(torch.autograd.Function):
    """Allocates what torch's kernel does: the forward variables, then the backward variables and the gradients."""

    @staticmethod
    def forward(ctx: Any, log_probabilities: Tensor, states: int) -> Tensor:
        time, sequences, _ = log_probabilities.shape
        ctx.save_for_backward(log_probabilities, log_probabilities.new_zeros(sequences, time, states))
        return log_probabilities.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_probabilities, forward_variables = ctx.saved_tensors
        backward_variables = torch.zeros_like(forward_variables)
        gradients = torch.zeros_like(log_probabilities)
        del backward_variables
        return gradients, None


def _ctc_loss(
    log_probabilities: Tensor, targets: Tensor, sizes: Tensor, target_sizes: Tensor, blank: int, reduction: str
) -> Tensor:
    """torch's function of that name, whose kernel it lacks on the meta device."""
    loss: Tensor = _CtcLoss.apply(log_probabilities, 2 * int(target_sizes.max()) + 1)
    return loss


class _Recurrence(torch.autograd.Function):
    """Allocates and launches what cuDNN does for a layer in one or both directions.

    In both passes, each time step is one matrix product and one kernel for everything else. Products that need no state
    are computed at once, before or after all steps. torch copies the weights into one buffer, and their gradients are
    views of another one.
    """

    @staticmethod
    def forward(
        ctx: Any, kept_values: int, batch_sizes: list[int], count: int, x: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs (N, D * W) for x (N, I), and the last states.

        Args:
            kept_values: See `_KEPT`.
            count: How many of `tensors` are states.
            tensors: The states, (D, S, W) each, then the four weights of each of the D directions.
        """
        states, weights = tensors[:count], tensors[count:]
        directions, sequences, width = states[0].shape
        columns = len(weights[0])  # of all gates
        flat = torch.cat([weight.reshape(-1) for weight in weights])
        out = x.new_empty(len(x), directions * width)
        reserved = kept_values * width * sequences * len(batch_sizes)  # cuDNN knows the longest sequence alone
        kept = [x.new_empty(size) for size in (len(x) * columns, reserved - len(x) * columns) * directions]
        h, product = x.new_empty(sequences, width), x.new_empty(sequences, columns)
        for direction in range(directions):
            input_weight, state_weight = weights[4 * direction : 4 * direction + 2]
            gates = torch.mm(x, input_weight.T, out=kept[2 * direction].view(len(x), columns))
            for start, stop in pairwise(accumulate(batch_sizes, initial=0)):
                step = torch.mm(h[: stop - start], state_weight.T, out=product[: stop - start])
                gates[start:stop].add_(step)
        ctx.save_for_backward(x, flat, out, *kept, *tensors)  # torch saves the weights too, and copies them again
        ctx.batch_sizes, ctx.shapes = batch_sizes, [weight.shape for weight in weights]
        ctx.states = count, (directions, sequences, width)
        return out, *(torch.empty_like(state) for state in states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, flat, out, *kept = ctx.saved_tensors[: 3 + 2 * ctx.states[1][0]]
        count, (directions, sequences, width) = ctx.states
        grad_x = torch.empty_like(x)  # also if nothing needs it
        grad_states = [x.new_empty(directions, sequences, width) for _ in range(count)]
        grad_flat = torch.zeros_like(flat)
        weights, grad_weights = _views(flat, ctx.shapes), _views(grad_flat, ctx.shapes)
        product = x.new_empty(sequences, width)
        for direction in range(directions):
            input_weight, state_weight = weights[4 * direction : 4 * direction + 2]
            grad_gates, other = kept[2 * direction].view(len(x), -1), kept[2 * direction + 1]  # in the same memory
            for start, stop in pairwise(accumulate(ctx.batch_sizes, initial=0)):
                grad_gates[start:stop].mul_(other[: stop - start, None])
                torch.mm(grad_gates[start:stop], state_weight, out=product[: stop - start])
            torch.mm(grad_gates, input_weight, out=grad_x)
            torch.mm(grad_gates.T, x, out=grad_weights[4 * direction])
            states = out[:, direction * width : (direction + 1) * width]
            torch.mm(grad_gates.T, states, out=grad_weights[4 * direction + 1])
        return None, None, None, grad_x, *grad_states, *grad_weights


def _views(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _run_recurrence(
    cell: str,
    x: Tensor,
    batch_sizes: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """torch's function `lstm` or `gru` for packed sequences, of one layer with biases and without dropout."""
    assert has_biases and layers == 1 and not dropout
    states = [state] if isinstance(state, Tensor) else state
    found: tuple[Tensor, ...] = _Recurrence.apply(_KEPT[cell], batch_sizes.tolist(), len(states), x, *states, *weights)
    return found
