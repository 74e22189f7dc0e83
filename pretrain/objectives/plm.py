"""Permutation language modeling (Yang et al. 2019, section 2.2): tokens, each given those before it in a random order.

Samples are those of masked language modeling on full sentences, with the special tokens at the end: `d1 [SEP] d2 [SEP]
[CLS]`. Each document is a segment of its own, and [CLS] another one.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64, random_bits
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives import mlm
from multihop.pretrain.objectives.batch import Batch, ModelInput
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.masking import choose_spans, prediction_budgets
from multihop.pretrain.objectives.mlm import DOCUMENT_COLUMNS as DOCUMENT_COLUMNS
from multihop.pretrain.objectives.mlm import sample_count as sample_count
from multihop.pretrain.objectives.mlm import sample_rows as sample_rows
from multihop.pretrain.objectives.mlm import spans as spans
from multihop.pretrain.packed_tokens import CLS_TYPE, cumulative_lengths, pack, positions_in

SPAN_SHARES: NDArray[np.floating] = 1 / np.arange(1, 6)
SPAN_SHARES /= SPAN_SHARES.sum()
"""Probabilities of predicted spans of 1 to 5 tokens, as in the published code (section 2.6 gives no distribution)."""


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """The index of `mlm.build_index`.

    Raises:
        ValueError: No sequence has two tokens, the fewest that a permutation of which some are predicted can have.
    """
    longest = documents.lengths.max(initial=0) if objective.isolate_documents else documents.lengths.sum()
    if longest < 2:
        raise ValueError(
            "objective.name=plm predicts some tokens of a permutation from others, and no sequence has two; prepare "
            "longer documents, or set objective.isolate_documents=false"
        )
    return mlm.build_index(documents, seq_len, key, objective)


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """The inputs of both streams for some samples, `d1 [SEP] d2 [SEP] [CLS]` each, after the `mem_len` tokens
    that precede it in d1.

    Isolated documents are separate sequences: `d1 [SEP] [CLS]`, `d2 [SEP] [CLS]`. As in the published code, predicted
    and special tokens have places in the order, and all others are seen by all tokens.

    Args:
        rows: int64 (B, 4), rows of the index.
        keys: uint64 (B,), the key of each sample's order and predictions.
    """
    special = tokenizer.special_ids
    texts: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for row in rows:
        parts = spans(documents, row, seq_len, objective)
        counts.append(len(parts))
        texts += [documents.tokens(document)[start:stop] for document, start, stop in parts]
    last = np.cumsum(counts) - 1
    first = np.concatenate([[0], last[:-1] + 1]).astype(np.int64)
    number = np.arange(len(texts)) - np.repeat(first, counts)
    ends_sample = np.zeros(len(texts), bool)
    ends_sample[last] = True
    has_cls = ends_sample | objective.isolate_documents
    lengths = np.array([len(text) for text in texts]) + 1 + has_cls
    stops = np.cumsum(lengths)
    input_ids = np.full(stops[-1], special["sep"], np.int64)
    for text, start in zip(texts, (stops - lengths).tolist(), strict=True):
        input_ids[start : start + len(text)] = text
    # Segments are only compared; that of [CLS] has the number that fine-tuning gives it.
    types = np.repeat(number + (number >= CLS_TYPE), lengths)
    at_cls = stops[has_cls] - 1
    input_ids[at_cls], types[at_cls] = special["cls"], CLS_TYPE

    cu_samples = cumulative_lengths(np.add.reduceat(lengths, first))
    cu_seqlens = cumulative_lengths(lengths) if objective.isolate_documents else cu_samples
    sequence_keys = np.repeat(keys, counts) if objective.isolate_documents else keys
    predicted, order = _permute(
        input_ids, cu_seqlens, positions_in(cu_samples), sequence_keys, objective, sorted(special.values())
    )
    labels = input_ids[predicted]
    inputs: dict[str, ModelInput] = {
        "packed": pack(input_ids, cu_seqlens, types),
        "masked_positions": predicted,
        "labels": labels,
        "factorization_order": order,
    }
    if objective.mem_len:
        memories = [
            documents.tokens(document)[max(0, start - objective.mem_len) : start]
            for document, start in rows[:, :2].tolist()
        ]
        inputs |= _after_memories(memories, cu_samples, input_ids, types, cu_seqlens, predicted, order)
    return Batch(inputs, targets=labels, counts={"plm": len(labels)}, tokens=len(input_ids))


def _after_memories(
    memories: list[NDArray[Any]],
    cu_samples: NDArray[np.int64],
    input_ids: NDArray[np.int64],
    types: NDArray[np.int64],
    cu_seqlens: NDArray[np.int64],
    predicted: NDArray[np.int64],
    order: NDArray[np.int64],
) -> dict[str, ModelInput]:
    """The inputs that change when each sample's memory is put before its first sequence, whose segment it shares."""
    cu_memories = cumulative_lengths([len(each) for each in memories])
    at = np.repeat(cu_samples[:-1], np.diff(cu_memories))
    is_memory = np.insert(np.zeros(len(input_ids), bool), at, True)
    ids = np.insert(input_ids, at, np.concatenate(memories))
    # A sequence that begins a sample begins before the sample's memory, and a token after it.
    bounds = cu_seqlens + cu_memories[np.searchsorted(cu_samples[:-1], cu_seqlens, side="left")]
    return {
        "packed": pack(ids, bounds, np.insert(types, at, 0)),
        "masked_positions": predicted + cu_memories[np.searchsorted(cu_samples[:-1], predicted, side="right")],
        "factorization_order": np.insert(order, at, -1),
        "is_memory": is_memory,
    }


def _permute(
    input_ids: NDArray[np.int64],
    cu_seqlens: NDArray[np.int64],
    offsets: NDArray[np.int64],
    keys: UInt64,
    objective: ObjectiveConfig,
    specials: list[int],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose the tokens to predict and draw the factorization order of each sequence; arguments as of `mask_tokens`.

    At least one token that is not special stays visible to all.

    Returns:
        The predicted tokens, int64 (M,), ascending. The order, int64 (N,): -1 for tokens that all tokens see, and from
        0 for predicted and special ones.
    """
    lengths = np.diff(cu_seqlens)
    ordinary = ~np.isin(input_ids, specials)
    most = np.maximum(0, np.add.reduceat(ordinary, cu_seqlens[:-1], dtype=np.int64) - 1)
    budgets = np.minimum(prediction_budgets(lengths, objective), most)
    token_keys, counters = np.repeat(keys, lengths), offsets.astype(np.uint64)
    every = np.ones(len(input_ids), bool)
    predicted = choose_spans(ordinary, cu_seqlens, every, token_keys, counters, budgets, SPAN_SHARES, overlap=False)
    in_order = np.flatnonzero(predicted | np.isin(input_ids, specials))
    drawn = random_bits(token_keys[in_order] ^ np.uint64(4), counters[in_order])
    sequence = np.searchsorted(cu_seqlens, in_order, side="right") - 1
    sorted_ = np.lexsort([drawn, sequence])
    first = np.searchsorted(sequence, sequence)  # `sequence` ascends, also when sorted by it first
    order = np.full(len(input_ids), -1, np.int64)
    order[in_order[sorted_]] = np.arange(len(in_order)) - first
    return np.flatnonzero(predicted), order
