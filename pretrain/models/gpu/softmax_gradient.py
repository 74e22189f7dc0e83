"""The cross-entropy of a softmax and its gradient, in the memory of the logits, on a GPU.

One kernel reads each row twice and writes it once. The second time most of a row is still in the cache, and no fp32
copy of the logits exists, which are much larger than anything else in a step.
"""

import torch
from torch import Tensor

from multihop.pretrain.models.gpu.kernel import launch, tl, triton

_BLOCK, _WARPS = 2048, 8
_GROUP = tl.constexpr(8)
"""Neighboring logits with a common maximum, in bf16 and fp16 all in one thread, so that threads exchange numbers only
after the row."""
_LOWEST = tl.constexpr(-1e30)
"""Below all logits, and finite: it is subtracted from -inf."""


def softmax_gradient_(logits: Tensor, targets: Tensor, vocab_size: int, label_smoothing: float) -> Tensor:
    """Replace each row of logits by the gradient of its cross-entropy.

    Args:
        logits: (M, C), C >= vocab_size, with contiguous rows; the other columns are padding of any value, and become 0.
        targets: int64 (M,).
        label_smoothing: as in `fused_linear_cross_entropy`.

    Returns:
        Sum of the cross-entropies, fp32 ().
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    launch(
        _softmax_gradient,
        (len(logits),),
        logits,
        logits.stride(0),
        targets,
        losses,
        label_smoothing,
        vocab_size,
        logits.shape[1],
        IS_SMOOTHED=label_smoothing > 0,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return losses.sum()


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # no types: Triton would compile them
def _softmax_gradient(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    targets,
    losses,
    smoothing,
    vocab_size: tl.constexpr,
    columns: tl.constexpr,
    IS_SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the loss of one row and replace its logits by the gradient."""
    number = tl.program_id(0).to(tl.int64)  # with 32 bits the offset of a row would overflow
    row = logits + number * row_stride
    target = tl.load(targets + number)
    groups: tl.constexpr = BLOCK // _GROUP
    largest, exponentials = tl.full((groups,), _LOWEST, tl.float32), tl.zeros((groups,), tl.float32)
    totals = tl.zeros((groups,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        column = start + tl.arange(0, groups)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        x = tl.load(row + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 1))
        exponentials = exponentials * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[:, None]), 1)
        largest = larger
        if IS_SMOOTHED:
            totals += tl.sum(tl.where(column < vocab_size, x, 0.0), 1)
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(exponentials * tl.exp(largest - top), 0))
    loss = log_sum - (1.0 - smoothing) * tl.load(row + target).to(tl.float32)
    if IS_SMOOTHED:
        loss -= smoothing / vocab_size * tl.sum(totals, 0)
    tl.store(losses + number, loss)
    tl.debug_barrier()  # all threads have read the target's logit before one of them replaces it
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(column == target, 1.0 - smoothing, 0.0)
        if IS_SMOOTHED:
            gradient -= smoothing / vocab_size
        gradient = tl.where(column < vocab_size, gradient, 0.0)
        tl.store(row + column, gradient.to(logits.dtype.element_ty), mask=column < columns)
