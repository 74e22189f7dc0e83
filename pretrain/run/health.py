"""Health metrics of a run: detects plateaus and representation collapse from hidden states and attention.

In a plateau of the loss the last hidden states of different tokens become nearly parallel, and attention is learned
slowly (Gopalani and Hu 2025, arXiv 2506.13688). The loss alone does not distinguish this from slow progress.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.engine.capture import capture_activations
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.models.layers.attention import Sequences
from multihop.pretrain.models.relative_positions import expand_by_distance
from multihop.pretrain.objectives.batch import Batch

HEALTH_PARTS = 16
"""The model runs on the first of this many equal parts of the held-out samples."""
_QUERIES = 16
"""Number of evenly spaced queries of a sequence whose attention is measured."""


def health(engine: Engine, batches: BatchBuilder, heartbeat: Callable[[], None]) -> dict[str, float]:
    """`hidden_cosine` and `hidden_rank` over all ranks, and `attention_entropy` if attention can be captured. A
    collective call.

    The effective rank is divided by its maximum, and the entropy by that of uniform attention: both are 0 to 1 in a
    model of any size. The model runs once more, on a sixteenth of the held-out samples, so that the computation of the
    held-out loss does not change.
    """
    share = batches.heldout(parts=HEALTH_PARTS)
    hidden, device = engine.module.config.state_width, engine.ranks.device
    shapes = {"tokens": (), "directions": (hidden,), "products": (hidden, hidden), "entropies": (), "queries": ()}
    sums = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
    is_counted = True

    def micro_batches() -> Iterator[Batch]:
        nonlocal is_counted
        for batch in share.micro_batches:
            heartbeat()
            is_counted = any(batch.counts.values())  # else it is borrowed, and another rank counts it
            yield batch

    def on_states(states: Tensor) -> None:
        if is_counted:
            each = states.double()
            sums["tokens"] += len(each)
            sums["directions"] += F.normalize(each, dim=-1).sum(0)
            sums["products"] += each.T @ each

    def on_attention(
        query: Tensor, key: Tensor, relative: Tensor | None, sequences: Sequences, causal: bool, window: int | None
    ) -> None:
        if is_counted:
            entropies, measured = attention_entropies(query, key, relative, sequences, causal, window)
            sums["entropies"] += entropies.sum()
            sums["queries"] += measured.sum()

    with capture_activations(engine.module, on_states, on_attention):
        engine.evaluate(micro_batches())
    for total in sums.values():
        engine.ranks.all_reduce_sum_(total)
    tokens = int(sums["tokens"])
    metrics = {
        "hidden_cosine": mean_cosine(sums["directions"], tokens),
        "hidden_rank": effective_rank(sums["products"]) / min(hidden, tokens),
    }
    if sums["queries"]:
        metrics["attention_entropy"] = float(sums["entropies"] / sums["queries"])
    return metrics


def mean_cosine(directions: Tensor, count: int) -> float:
    """Mean cosine similarity of all pairs of `count` different vectors; NaN if there is only one.

    |sum of unit vectors|^2 is the sum of the cosines of all pairs, including each vector with itself (`count`).

    Args:
        directions: float64 (H,), the sum of the vectors, each divided by its norm.
    """
    return (float(directions.square().sum()) - count) / (count * (count - 1)) if count > 1 else math.nan


def effective_rank(products: Tensor) -> float:
    """exp(entropy) of the normalized singular values, 1 to H (Roy and Vetterli 2007, section 2).

    The states are not centered, like the embeddings of Garrido et al. 2023 (RankMe): states with a large common
    component have a low rank, even if the rest of them has all directions.

    Args:
        products: float64 (H, H), X^T X of a matrix X (N, H) or a multiple of it; its eigenvalues are the squares of the
            singular values of X.
    """
    if not torch.isfinite(products).all():
        return math.nan
    singular = torch.linalg.eigvalsh(products).clamp(min=0).sqrt()
    return math.exp(float(torch.special.entr(singular / singular.sum()).sum()))


def attention_entropies(
    query: Tensor,
    key: Tensor,
    relative: Tensor | None,
    sequences: Sequences,
    causal: bool,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Entropy of attention weights, divided by the log of the number of keys that a query sees: 1 for uniform
    attention, 0 for attention to a single key.

    It is measured for up to 16 evenly spaced queries of each sequence, except those that see only one key.

    Args:
        query, key: (N, heads, width).
        relative: (N, heads, C), as in `attention.attend`.
        window: as in `attention.attend`.

    Returns:
        The entropies, float32 (S, heads, 16), 0 where not measured; a bool mask of this shape, true where measured.
    """
    starts, lengths = sequences.cu_seqlens[:-1, None], sequences.cu_seqlens.diff()[:, None]
    columns = torch.arange(sequences.max_seqlen, device=query.device)
    parts = 2 * torch.arange(_QUERIES, device=query.device) + 1
    rows = parts * lengths // (2 * _QUERIES)  # (S, 16)
    keys = key[starts + torch.minimum(columns, lengths - 1)].float()  # (S, T, heads, width)
    scores = torch.einsum("sqhw,sthw->shqt", query[starts + rows].float(), keys)
    if relative is not None:
        scores += expand_by_distance(
            relative[starts + rows].float().transpose(1, 2), rows[:, None], len(columns), causal
        )
    scores *= query.shape[-1] ** -0.5
    last = rows if causal else (lengths - 1).expand_as(rows)
    first = torch.zeros_like(rows)
    if window is not None:
        first, last = (rows - window).clamp(min=0), torch.minimum(last, rows + window)
    seen = last - first + 1
    visible = ((columns >= first[..., None]) & (columns <= last[..., None]))[:, None]  # (S, 1, 16, T)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    measured = (seen > 1)[:, None].expand(scores.shape[:-1])
    entropies = torch.special.entr(weights).sum(-1) / seen.clamp(min=2).log()[:, None]
    return entropies * measured, measured
