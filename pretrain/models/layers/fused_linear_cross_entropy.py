"""The output projection fused with its cross-entropy, in chunks of rows: the whole logits are never in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.device_type import device_type
from multihop.pretrain.models.gpu import can_run

_CHUNK_LOGITS = {"cpu": 2**25, "cuda": 2**28}
"""Elements of a chunk of logits: 128 MiB and 1 GiB of fp32. Each chunk adds to the whole gradient of the weight, so
smaller chunks are slower: on CPU 2**23 by a tenth. On a GPU that sum would take a quarter of the products' time at
2**25 and a thirtieth at 2**28: estimated from the datasheet, not measured."""
_ALIGNMENT = 64
"""The row stride of the logits and the number of rows of a chunk are multiples of this: the products are up to a third
faster than with 50,257 columns, and compiled code copies inputs that are not aligned to 16 bytes."""


def fused_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Sum of the cross-entropies, in nats, of predicting `targets` by softmax(hidden @ weight.T + bias); fp32 ().

    The gradients are computed with the loss, while a chunk's logits are in memory, so that nothing is computed twice.

    Args:
        hidden: (M, H); weight: (V, H); bias: (V,).
        targets: int64 (M,).
        label_smoothing: eps; the target distribution has 1 - eps + eps / V at the target and eps / V at every other
            token (Szegedy et al. 2016, section 7; so in F.cross_entropy and transformers; fairseq: eps / (V - 1)).
    """
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor = _FusedLinearCrossEntropy.apply(hidden, weight, bias, targets, label_smoothing, needs_grad)
    return loss


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        label_smoothing: float,
        needs_grad: bool,
    ) -> Tensor:
        on_gpu = device_type(hidden.device) == "cuda"
        vocab_size, columns = len(weight), -(-len(weight) // _ALIGNMENT) * _ALIGNMENT
        if on_gpu and columns > vocab_size:
            # cuBLAS has no fast kernel for 50,257 columns: two of the three products took seven times as long.
            weight = F.pad(weight, (0, 0, 0, columns - vocab_size))
            bias = None if bias is None else F.pad(bias, (0, columns - vocab_size))
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        # They are sums over many rows, and in fp32 whatever the dtype of the weights.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_grad and bias is not None else None
        most_rows = _CHUNK_LOGITS[device_type(hidden.device)] // vocab_size
        rows = max(1, min(len(hidden), max(_ALIGNMENT, most_rows // _ALIGNMENT * _ALIGNMENT)))
        buffer = hidden.new_empty(rows, columns)
        for start in range(0, len(hidden), rows):
            chunk, chunk_targets = hidden[start : start + rows], targets[start : start + rows]
            padded = buffer[: len(chunk)]
            logits = padded[:, : len(weight)]  # on a GPU all columns
            if bias is None:
                torch.mm(chunk, weight.T, out=logits)
            else:
                torch.addmm(bias, chunk, weight.T, out=logits)
            loss += _cross_entropy_(padded, chunk_targets, vocab_size, label_smoothing, needs_grad)
            if grad_hidden is None or grad_weight is None:
                continue
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=torch.float32)
            torch.mm(logits, weight, out=grad_hidden[start : start + rows])
            _add_product_(grad_weight, logits, chunk)
        if grad_hidden is not None and grad_weight is not None:
            saved = [grad_weight] if grad_bias is None else [grad_weight, grad_bias]
            ctx.save_for_backward(grad_hidden, *(gradient[:vocab_size] for gradient in saved))
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, *grad_bias = ctx.saved_tensors
        scale = gradients[0]
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            grad_weight.mul_(scale).to(ctx.dtypes[0]),
            grad_bias[0].mul_(scale).to(ctx.dtypes[1]) if grad_bias else None,
            None,
            None,
            None,
        )


def _cross_entropy_(
    padded: Tensor, targets: Tensor, vocab_size: int, label_smoothing: float, needs_grad: bool
) -> Tensor:
    """Sum of the cross-entropies of rows of logits, (M, C), and `targets`, int64 (M,); fp32 ().

    With `needs_grad` the logits of the vocabulary are replaced by the gradient, on a GPU with zeros after them.
    """
    if needs_grad and can_run(padded):
        from multihop.pretrain.models.gpu.softmax_gradient import softmax_gradient_  # needs Triton

        return softmax_gradient_(padded, targets, vocab_size, label_smoothing)
    targets = targets[:, None]
    padded[:, vocab_size:] = -torch.inf  # a probability of 0
    in_place = padded if padded.dtype == torch.float32 else None
    log_softmax = torch.log_softmax(padded, -1, dtype=torch.float32, out=in_place)
    loss = (label_smoothing - 1) * log_softmax.gather(1, targets).sum()
    if label_smoothing:
        loss -= label_smoothing / vocab_size * log_softmax[:, :vocab_size].sum()
    if needs_grad:
        share = torch.full_like(targets, label_smoothing - 1, dtype=torch.float32)
        gradient = log_softmax.exp_().scatter_add_(1, targets, share)
        if label_smoothing:
            gradient[:, :vocab_size] -= label_smoothing / vocab_size
        if in_place is None:
            padded.copy_(gradient)
    return loss


def _add_product_(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add grad_logits.T @ hidden to `total`, in fp32."""
    if hidden.dtype == total.dtype:
        total.addmm_(grad_logits.T, hidden)
    elif device_type(hidden.device) == "cuda":
        torch.addmm(total, grad_logits.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += grad_logits.T @ hidden
