"""The loss of a head that points at the start and the end of an answer."""

import torch
from torch import Tensor


def span_loss(logits: Tensor, starts: Tensor, ends: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Mean cross-entropy in nats, in fp32, of the start and of the end among the tokens of their sequence.

    Devlin et al. 2018, section 4.2: S·T_i and E·T_i are the logits of token i; their softmax is over one sequence.

    Args:
        logits: float (N, 2), of the start and of the end, of the N tokens of S packed sequences.
        starts, ends: int64 (S,), the right positions, counted from the beginning of each sequence.
        cu_seqlens: int64 (S + 1,), cumulative sequence lengths, from 0 to N.
    """
    logits = logits.float()
    begins, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    sequence = torch.repeat_interleave(lengths, output_size=len(logits))
    # The largest logit is subtracted for range alone: it needs no gradient.
    largest = logits.new_full((len(lengths), 2), -torch.inf)
    largest = largest.scatter_reduce(0, sequence[:, None].expand(-1, 2), logits.detach(), "amax")
    sums = torch.zeros_like(largest).index_add(0, sequence, (logits - largest[sequence]).exp())
    chosen = torch.stack([logits[begins + starts, 0], logits[begins + ends, 1]], dim=1)
    return (largest + sums.log() - chosen).mean()
