"""Objectives on sentence pairs: next-sentence and sentence-order prediction, each with masked language modeling.

The pairs follow the original `create_instances_from_document` (Devlin et al. 2018, A.2; Lan et al. 2020, 3.1), with
two differences: they are formed once, in the sample index, so that an epoch uses each exactly once; and epochs
differ in masks and order, not in pairs.
"""

import logging
import random
from array import array

import numpy as np
from numpy.typing import NDArray

from multihop.common.counter_rng import UInt64
from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.objectives.config import ObjectiveConfig
from multihop.pretrain.objectives.masking import mask_tokens
from multihop.pretrain.packed_tokens import cumulative_lengths, pack, positions_in

log = logging.getLogger("multihop")

SHORT_SHARE = 0.1
"""Share of documents with a random shorter target length, so that the model also trains on short inputs."""
RANDOM_SHARE = 0.5
"""mlm+nsp: share of pairs of two sentences or more whose second segment is replaced by one of another document."""
SWAPPED_SHARE = 0.5
"""mlm+sop: share of pairs whose segments are swapped."""
SPECIALS_PER_PAIR = 3
DOCUMENT_COLUMNS = [0, 3]
"""The columns of the index that hold document numbers."""


def build_index(documents: Documents, seq_len: int, key: int, objective: ObjectiveConfig) -> NDArray[np.int64]:
    """All pairs of a set of documents: int64 (samples, 7), (document, start, stop) twice, and 1 if random or swapped.

    Raises:
        UserError: The documents yield no pair.
    """
    rng = random.Random(key)
    room = seq_len - SPECIALS_PER_PAIR
    pairs = array("q")
    if objective.name == "mlm+nsp":
        if len(documents) < 2:
            raise UserError(
                f"next-sentence prediction draws from another document, and there is only {len(documents)}; "
                "prepare more documents (or a larger data.heldout_fraction if these are the held-out ones)"
            )
        for document in range(len(documents)):
            _add_nsp_pairs(documents, document, room, rng, pairs)
    else:
        alone = sum(_add_sop_pairs(documents, document, room, rng, pairs) for document in range(len(documents)))
        if not pairs:
            raise UserError(
                "sentence-order prediction needs documents of two sentences or more, and there is none; prepare longer "
                "documents, or set objective.name=mlm"
            )
        log.info("%d pairs; %d sentences, each alone at the end of a document, are in none", len(pairs) // 7, alone)
    return np.frombuffer(pairs, np.int64).reshape(-1, 7)


def _target_length(room: int, rng: random.Random) -> int:
    """The target length of a document's pairs, in tokens."""
    return room if rng.random() >= SHORT_SHARE else 2 + int(rng.random() * (room - 1))


def _add_nsp_pairs(documents: Documents, document: int, room: int, rng: random.Random, pairs: "array[int]") -> None:
    bounds = [0, *documents.sentence_ends(document).tolist()]
    sentences = len(bounds) - 1
    target = _target_length(room, rng)
    first = at = 0
    while at < sentences:
        if at < sentences - 1 and bounds[at + 1] - bounds[first] < target:
            at += 1
            continue
        count = at - first + 1
        split = first + 1 + (int(rng.random() * (count - 1)) if count > 1 else 0)
        a = (bounds[first], bounds[split])
        is_random = count == 1 or rng.random() < RANDOM_SHARE
        if is_random:
            other = int(rng.random() * (len(documents) - 1))
            other += other >= document
            b = _random_span(documents, other, target - (a[1] - a[0]), rng)
            at = split - 1  # the sentences displaced by the random segment go into the next pair
        else:
            other, b = document, (bounds[split], bounds[at + 1])
        a, b = _cut_to_fit(a, b, room, rng)
        pairs.extend((document, *a, other, *b, int(is_random)))
        at += 1
        first = at


def _add_sop_pairs(documents: Documents, document: int, room: int, rng: random.Random, pairs: "array[int]") -> int:
    """Add pairs of two sentences or more; returns the number of sentences that are left over, 0 or 1.

    The original pairs a single sentence with a segment of another document, which is a different task.
    """
    bounds = [0, *documents.sentence_ends(document).tolist()]
    sentences = len(bounds) - 1
    target = _target_length(room, rng)
    first = 0
    for at in range(1, sentences):
        if first == at or (at < sentences - 1 and bounds[at + 1] - bounds[first] < target):
            continue
        split = first + 1 + int(rng.random() * (at - first))
        a, b = _cut_to_fit((bounds[first], bounds[split]), (bounds[split], bounds[at + 1]), room, rng)
        is_swapped = rng.random() < SWAPPED_SHARE
        if is_swapped:
            a, b = b, a
        pairs.extend((document, *a, document, *b, int(is_swapped)))
        first = at + 1
    return int(first < sentences)


def _random_span(documents: Documents, document: int, wanted: int, rng: random.Random) -> tuple[int, int]:
    """Whole sentences from a random one on, at least one, until they have `wanted` tokens or the document ends."""
    bounds = [0, *documents.sentence_ends(document).tolist()]
    first = int(rng.random() * (len(bounds) - 1))
    last = first
    while last < len(bounds) - 2 and bounds[last + 1] - bounds[first] < wanted:
        last += 1
    return bounds[first], bounds[last + 1]


def _cut_to_fit(
    a: tuple[int, int], b: tuple[int, int], room: int, rng: random.Random
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The original `truncate_seq_pair`: tokens are removed from the longer span, at its front or back at random."""
    length_a, length_b = a[1] - a[0], b[1] - b[0]
    surplus = length_a + length_b - room
    if surplus <= 0:
        return a, b
    from_longer = min(surplus, abs(length_a - length_b))
    rest = surplus - from_longer
    from_a, from_b = rest // 2, rest - rest // 2  # at equal lengths the second span loses the first token
    if length_a > length_b:
        from_a += from_longer
    else:
        from_b += from_longer

    def cut(span: tuple[int, int], surplus: int) -> tuple[int, int]:
        front = rng.getrandbits(surplus).bit_count() if surplus else 0
        return span[0] + front, span[1] - (surplus - front)

    return cut(a, from_a), cut(b, from_b)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """The number of samples in an index."""
    return len(index)


def sample_rows(index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64 (B, 7): the samples' rows of the index."""
    return index[samples]


def spans(
    documents: Documents, row: NDArray[np.int64], seq_len: int, objective: ObjectiveConfig
) -> list[tuple[int, int, int]]:
    """(document, start, stop) of a sample's two segments."""
    document, start, stop, other, other_start, other_stop, _ = row.tolist()
    return [(document, start, stop), (other, other_start, other_stop)]


def collate(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    objective: ObjectiveConfig,
) -> Batch:
    """The model's masked inputs for some samples, [CLS] a [SEP] b [SEP] each.

    Args:
        rows: int64 (B, 7), rows of the index.
        keys: uint64 (B,), the key of each sample's mask.
    """
    special = tokenizer.special_ids
    first, second = rows[:, 2] - rows[:, 1], rows[:, 5] - rows[:, 4]
    cu_seqlens = cumulative_lengths(first + second + SPECIALS_PER_PAIR)
    middles = cu_seqlens[:-1] + 1 + first
    input_ids = np.empty(cu_seqlens[-1], np.int64)
    input_ids[cu_seqlens[:-1]] = special["cls"]
    input_ids[middles] = input_ids[cu_seqlens[1:] - 1] = special["sep"]
    for begin, middle, (document, start, stop, other, other_start, other_stop, _) in zip(
        cu_seqlens.tolist(), middles.tolist(), rows.tolist(), strict=False
    ):
        input_ids[begin + 1 : middle] = documents.tokens(document)[start:stop]
        input_ids[middle + 1 : middle + 1 + other_stop - other_start] = documents.tokens(other)[other_start:other_stop]
    masked, masked_positions, labels = mask_tokens(
        input_ids, cu_seqlens, positions_in(cu_seqlens), keys, objective, tokenizer
    )
    token_type_ids = np.repeat(np.tile([0, 1], len(rows)), np.stack([first + 2, second + 1], axis=1).ravel())
    task, label = ("nsp", "is_random_next") if objective.name == "mlm+nsp" else ("sop", "is_swapped")
    return Batch(
        inputs={
            "packed": pack(masked, cu_seqlens, token_type_ids),
            "masked_positions": masked_positions,
            "labels": labels,
            label: rows[:, 6].copy(),
        },
        targets=labels,
        counts={"mlm": len(labels), task: len(rows)},
        tokens=len(masked),
    )
