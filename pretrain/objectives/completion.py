"""Completion: the target of a pair, given its source, by a causal model (Bosselut et al. 2019, section 3).

A sample is a pair. The model reads `end source end target` and predicts `target end`, from the second end token on; the
source is read, not predicted. The end token before the source is the one before a document in causal language modeling,
and the one after it separates it from the target: a model that was pretrained so knows both, and needs no new token.
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
from multihop.pretrain.packed_tokens import cumulative_lengths, pack, positions_in


def prompt_tokens(source: list[int], end: int) -> list[int]:
    """The tokens that the model reads before it predicts the target's first one."""
    return [end, *source, end]


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """int64 (pairs, 3): document, and tokens of the whole sequence and of the target with its end token, sorted by the
    former.

    Pairs of more than `seq_len` tokens are left out, with a warning.
    """
    whole = documents.lengths + 2
    target = documents.lengths - documents.source_lengths + 1
    return index_by_length([whole, target], seq_len, "sequences")


def spans(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int]]:
    """(document, start, stop) of the two sides."""
    document, whole, target = row.tolist()
    source = whole - target - 1
    return [(document, 0, source), (document, source, whole - 2)]


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """Each pair as a packed sequence, and the positions that predict a token of its target or the end after it."""
    end = tokenizer.special_ids["end"]
    whole_lengths, target_lengths = rows[:, 1], rows[:, 2]
    input_ids = np.full(whole_lengths.sum(), end, np.int64)
    labels = np.full(target_lengths.sum(), end, np.int64)
    read = written = 0
    for document, whole, target in rows.tolist():
        tokens, source = documents.tokens(document), whole - target - 1
        input_ids[read + 1 : read + 1 + source] = tokens[:source]
        input_ids[read + 2 + source : read + whole] = tokens[source:]
        labels[written : written + target - 1] = tokens[source:]
        read, written = read + whole, written + target
    ends, target_starts = np.cumsum(whole_lengths), cumulative_lengths(target_lengths)
    return Batch(
        inputs={
            "packed": pack(input_ids, cumulative_lengths(whole_lengths)),
            "labels": labels,
            "predicting_positions": np.repeat(ends - target_lengths, target_lengths) + positions_in(target_starts),
        },
        targets=labels,
        counts={"completion": labels.size},
        tokens=input_ids.size,
    )
