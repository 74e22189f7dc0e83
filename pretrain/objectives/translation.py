"""Translation: the next token of the target, given the source and the target's earlier tokens.

A sample is a pair. The encoder reads `source end`; the decoder reads `pad target` and predicts `target end` (Vaswani et
al. 2017, figure 1; it starts with the padding token, as in T5 and Marian).
"""

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.pairs import DOCUMENT_COLUMNS as DOCUMENT_COLUMNS
from multihop.pretrain.objectives.pairs import index_by_length
from multihop.pretrain.objectives.pairs import sample_count as sample_count
from multihop.pretrain.objectives.pairs import sample_rows as sample_rows
from multihop.pretrain.packed_tokens import cumulative_lengths, pack


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """int64 (pairs, 3): document, and tokens of source and target with their end tokens, sorted by the longer side.

    Pairs with a side longer than `seq_len` are left out, with a warning.
    """
    source = documents.source_lengths + 1
    return index_by_length([source, documents.lengths + 2 - source], seq_len, "a side")


def spans(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int]]:
    """(document, start, stop) of the two sides."""
    document, source, target = row.tolist()
    return [(document, 0, source - 1), (document, source - 1, source + target - 2)]


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """Both sides of the pairs as packed sequences."""
    start, end = tokenizer.special_ids["pad"], tokenizer.special_ids["end"]
    source_lengths, target_lengths = rows[:, 1], rows[:, 2]
    source_ids = np.full(source_lengths.sum(), end, np.int64)
    labels = np.full(target_lengths.sum(), end, np.int64)
    input_ids = np.full(target_lengths.sum(), start, np.int64)
    read = written = 0
    for document, source, target in rows.tolist():
        tokens = documents.tokens(document)
        source_ids[read : read + source - 1] = tokens[: source - 1]
        labels[written : written + target - 1] = tokens[source - 1 :]
        input_ids[written + 1 : written + target] = tokens[source - 1 :]
        read, written = read + source, written + target
    return Batch(
        inputs={
            "source": pack(source_ids, cumulative_lengths(source_lengths)),
            "target": pack(input_ids, cumulative_lengths(target_lengths)),
            "labels": labels,
            "label_smoothing": objective.label_smoothing,
        },
        targets=labels,
        counts={"translation": labels.size},
        tokens=source_ids.size + labels.size,
    )
