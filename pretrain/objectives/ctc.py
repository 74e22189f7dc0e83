"""Connectionist temporal classification (Graves et al. 2006): the target of a pair, a token or a blank for each token
of its source, in order.

A sample is a pair. The encoder reads `source end`, and each of its states emits a token of the target or a blank, which
is the padding token. The target's probability is the sum over all sequences of emissions that give it when repetitions
are merged and then blanks removed (section 3.1). A target with more tokens than there are states, counting a blank
between two equal tokens, has no such sequence, and its pair is left out.
"""

import logging

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.pairs import DOCUMENT_COLUMNS as DOCUMENT_COLUMNS
from multihop.pretrain.objectives.pairs import index_by_length
from multihop.pretrain.objectives.pairs import sample_count as sample_count
from multihop.pretrain.objectives.pairs import sample_rows as sample_rows
from multihop.pretrain.packed_tokens import cumulative_lengths, pack

log = logging.getLogger("multihop")


def min_states(target: NDArray[np.integer]) -> int:
    """The number of states that a target needs at least: one for each token, and one for a blank between two equal
    ones."""
    return len(target) + int((target[1:] == target[:-1]).sum())


def fitting_pairs(documents: Documents) -> NDArray[np.bool_]:
    """bool (pairs,): whether the source of each pair, with its end token, has as many tokens as its target needs
    states; see `min_states`."""
    sources = documents.source_lengths
    needed = documents.lengths - sources + documents.target_repeats
    fitting: NDArray[np.bool_] = needed <= sources + 1
    return fitting


def check_targets(documents: Documents, split: str, max_bad_fraction: float) -> None:
    """Refuse pairs of which too many have a target longer than its source.

    Args:
        split: the name of these documents, for messages.
        max_bad_fraction: the maximum share of such pairs.

    Raises:
        UserError: there are more.
    """
    misfits = np.flatnonzero(~fitting_pairs(documents))
    if not len(misfits):
        return
    first = int(documents.ids[misfits[0]])
    which = (
        f"{len(misfits):,} of {len(documents):,} {split} pairs have targets that need more states than their sources "
        f"have tokens, one for each token and for a blank between equal ones (first: document {first})"
    )
    if len(misfits) > max_bad_fraction * len(documents):
        raise UserError(
            f"{which}, which objective.name=ctc cannot predict, and data.max_bad_fraction={max_bad_fraction:g}; raise "
            "it to leave them out, swap source and target, or set an objective with a decoder"
        )
    log.warning("%s and are left out", which)


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """int64 (pairs, 3): document, tokens of the source with its end token, and of the target, sorted by the former.

    Pairs with a side longer than `seq_len` are left out, with a warning, and so are pairs whose target does not fit;
    see `check_targets`.
    """
    source = documents.source_lengths + 1
    rows = index_by_length([source, documents.lengths + 1 - source], seq_len, "a side")
    return rows[fitting_pairs(documents)[rows[:, 0]]]


def spans(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int]]:
    """(document, start, stop) of the two sides."""
    document, source, target = row.tolist()
    return [(document, 0, source - 1), (document, source - 1, source - 1 + target)]


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """Both sides of the pairs as packed sequences."""
    source_lengths, target_lengths = rows[:, 1], rows[:, 2]
    source_ids = np.full(source_lengths.sum(), tokenizer.special_ids["end"], np.int64)
    labels = np.empty(target_lengths.sum(), np.int64)
    read = written = 0
    for document, source, target in rows.tolist():
        tokens = documents.tokens(document)
        source_ids[read : read + source - 1] = tokens[: source - 1]
        labels[written : written + target] = tokens[source - 1 :]
        read, written = read + source, written + target
    return Batch(
        inputs={
            "source": pack(source_ids, cumulative_lengths(source_lengths)),
            "target": pack(labels, cumulative_lengths(target_lengths)),
            "blank": tokenizer.special_ids["pad"],
        },
        targets=labels,
        counts={"ctc": labels.size},
        tokens=source_ids.size + labels.size,
    )
