"""The sum of a bucket of gradients over the ranks under ZeRO 1 and 2, in few kernels.

DeepSpeed takes the sums out of a bucket with three kernels for each parameter, one of which only serves its own readers
of gradients. Here they are converted all at once, and added by kernels for many tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def reduce_in_few_kernels(zero: Any) -> None:
    """Make DeepSpeed's ZeRO optimizer of stage 1 or 2, whose gradients are added up in fp32, reduce a bucket so.

    Only where buckets are not contiguous, and the reduction does not overlap the backward pass: DeepSpeed's own
    methods for these stay.
    """
    theirs = zero._allreduce_noncontiguous_bucket_preserving_fp32

    def reduce(gradients: Sequence[Tensor], places: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> None:
        """places: of each gradient its group, its number in the group, and its id."""
        if zero.overlap_comm:
            theirs(gradients, places, dtype)
            return
        summed = zero.unflatten(zero.allreduce_bucket(gradients, dtype).float(), gradients)
        kept, parts = [], []
        for gradient, (group, _, number) in zip(summed, places, strict=True):
            rank = torch.distributed.get_rank(zero.real_dp_process_group[group])
            start = zero.grad_start_offset[group][rank].get(number)
            if start is not None:  # else nothing of it belongs to this rank
                at = int(zero.grad_partition_insertion_offset[group][rank][number])
                elements = min(gradient.numel() - int(start), int(zero.partition_size[group]) - at)
                kept.append(zero._get_compact_grad_partition_slice(group, rank, number, elements))
                parts.append(gradient.view(-1).narrow(0, int(start), elements))
        if kept:
            torch._foreach_add_(kept, parts)

    zero._allreduce_noncontiguous_bucket_preserving_fp32 = reduce
