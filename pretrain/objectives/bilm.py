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
from multihop.pretrain.objectives.batch import Batch, ModelInput
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.mlm import DOCUMENT_COLUMNS, sample_count, sample_rows, spans
from multihop.pretrain.packed_tokens import pack_sequences

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
    sequences: list[NDArray[np.int64]] = []
    contexts: list[tuple[int, int, int]] = []
    preceding: list[int] = []
    following: list[int] = []
    for row in rows:
        parts = spans(documents, row, seq_len, objective)
        sequences += [_between_marks(documents, *part, tokenizer) for part in parts]
        (first, start, _), (last, _, stop) = parts[0], parts[-1]
        before = first, max(0, start - objective.mem_len), start
        after = last, stop, min(stop + objective.mem_len, int(documents.lengths[last]))
        for read, context, first_of_sample in ((preceding, before, 0), (following, after, len(parts) - 1)):
            has_context = context[1] < context[2]
            contexts += [context] * has_context
            of_parts = [0] * len(parts)
            of_parts[first_of_sample] = len(contexts) * has_context
            read += of_parts
    packed = pack_sequences(sequences)
    next_positions = np.delete(np.arange(len(packed.input_ids)), packed.cu_seqlens[1:] - 1)
    labels = np.concatenate([packed.input_ids[next_positions + 1], packed.input_ids[next_positions]])
    inputs: dict[str, ModelInput] = {"packed": packed, "next_positions": next_positions}
    if objective.mem_len:
        # Of samples without contexts the model reads one token for nothing: all ranks must call the same modules.
        read_first = [_between_marks(documents, *each, tokenizer) for each in contexts]
        inputs |= {
            "context": pack_sequences(read_first or [packed.input_ids[:1]]),
            "preceding": np.array(preceding, np.int64),
            "following": np.array(following, np.int64),
        }
    return Batch(inputs, targets=labels, counts={"bilm": len(labels)}, tokens=len(packed.input_ids))


def _between_marks(
    documents: Documents, document: int, start: int, stop: int, tokenizer: TokenizerInfo
) -> NDArray[np.int64]:
    """A part of a document, each of its sentences between [CLS] and [SEP]."""
    begin, end = ([tokenizer.special_ids[name]] for name in ("cls", "sep"))
    ends, tokens = documents.sentence_ends(document).astype(np.int64), documents.tokens(document)
    cuts = [start, *ends[(ends > start) & (ends < stop)].tolist(), stop]
    marked = [np.concatenate([begin, tokens[first:last], end]) for first, last in pairwise(cuts)]
    return np.concatenate(marked).astype(np.int64)
