"""Bidirectional language modeling: the next token, and the previous one (Peters et al. 2018, section 3.1).

A sample takes sentence after sentence, across documents, until the next one does not fit, as under mlm. Each sentence
is between [CLS] and [SEP], which mark its beginning and end, and a document's sentences in a sample are one sequence:
`[CLS] s1 [SEP] [CLS] s2 [SEP]`. Only tokens of the same sequence are predicted from each other.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives import mlm
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.mlm import DOCUMENT_COLUMNS, sample_count, sample_rows, spans
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

__all__ = ["DOCUMENT_COLUMNS", "build_index", "collate", "sample_count", "sample_rows", "spans"]


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """All samples of a set of documents, as `mlm.build_index` has them."""
    return mlm.full_sentences(documents, seq_len, gap=0, sentence_gap=2)


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """The model's inputs for some samples; both models predict as many tokens.

    Args:
        rows: int64 (B, 4), rows of the index.
        keys: uint64 (B,), not used: nothing is drawn.
    """
    begin, end = ([tokenizer.special_ids[name]] for name in ("cls", "sep"))
    parts: list[NDArray[np.int64]] = []
    lengths = []
    for row in rows:
        for document, start, stop in spans(documents, row, seq_len, objective):
            ends = documents.sentence_ends(document).astype(np.int64)
            cuts = [start, *ends[(ends > start) & (ends < stop)].tolist(), stop]
            tokens = documents.tokens(document)
            parts += [np.concatenate([begin, tokens[first:last], end]) for first, last in pairwise(cuts)]
            lengths.append(stop - start + 2 * (len(cuts) - 1))
    input_ids, cu_seqlens = np.concatenate(parts).astype(np.int64), cumulative_lengths(lengths)
    next_positions = np.delete(np.arange(len(input_ids)), cu_seqlens[1:] - 1)
    labels = np.concatenate([input_ids[next_positions + 1], input_ids[next_positions]])
    return Batch(
        inputs={"packed": pack(input_ids, cu_seqlens), "next_positions": next_positions},
        targets=labels,
        counts={"bilm": len(labels)},
        tokens=len(input_ids),
    )
