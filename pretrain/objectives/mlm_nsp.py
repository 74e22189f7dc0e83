"""BERT's objective: masked pieces, and whether the second segment follows the first (Devlin et al. 2018, A.2).

The pairs follow the original's `create_instances_from_document`, with two differences: they are laid out once, in the
sample index, so that an epoch uses each exactly once; and epochs differ in masks and order, not in pairs.
"""

import random

import numpy as np
from numpy.typing import NDArray

from data_prep.manifest import TokenizerInfo
from data_prep.shards import Documents
from pretrain.keyed import UInt64
from pretrain.objectives.batch import Batch
from pretrain.objectives.masking import mask_pieces

SHORT_SHARE = 0.1
"""Share of documents whose sequences are cut short, so that short inputs are seen too."""
RANDOM_SHARE = 0.5
"""Share of pairs whose second segment comes from another document."""
SPECIALS_A_PAIR = 3
DOCUMENT_COLUMNS = [0, 3]
"""Where a row of the index holds numbers of documents."""


def build_index(documents: Documents, seq_len: int, key: int) -> NDArray[np.int64]:
    """All pairs of a set of documents: int64 (samples, 7) of (document, start, stop) twice, and 1 if random.

    Raises:
        ValueError: fewer than two documents; there is no other document to draw from.
    """
    if len(documents) < 2:
        raise ValueError(
            f"next-sentence prediction draws from another document, and there is {len(documents)} here; "
            "prepare more documents (or a larger data.heldout_fraction if these are the held-out ones)"
        )
    rng = random.Random(key)
    longest = seq_len - SPECIALS_A_PAIR
    pairs: list[tuple[int, int, int, int, int, int, int]] = []
    for document in range(len(documents)):
        _lay_out(documents, document, longest, rng, pairs)
    return np.array(pairs, np.int64).reshape(-1, 7)


def _lay_out(
    documents: Documents,
    document: int,
    longest: int,
    rng: random.Random,
    pairs: list[tuple[int, int, int, int, int, int, int]],
) -> None:
    bounds = [0, *documents.sentence_ends(document).tolist()]
    sentences = len(bounds) - 1
    target = longest if rng.random() >= SHORT_SHARE else 2 + int(rng.random() * (longest - 1))
    first = at = 0
    while at < sentences:
        if at < sentences - 1 and bounds[at + 1] - bounds[first] < target:
            at += 1
            continue
        held = at - first + 1
        split = first + 1 + (int(rng.random() * (held - 1)) if held > 1 else 0)
        a = (bounds[first], bounds[split])
        is_random = held == 1 or rng.random() < RANDOM_SHARE
        if is_random:
            other = int(rng.random() * (len(documents) - 1))
            other += other >= document
            b = _random_span(documents, other, target - (a[1] - a[0]), rng)
            at = split - 1  # the sentences that the random segment displaced go into the next pair
        else:
            other, b = document, (bounds[split], bounds[at + 1])
        a, b = _cut_to_fit(a, b, longest, rng)
        pairs.append((document, *a, other, *b, int(is_random)))
        at += 1
        first = at


def _random_span(documents: Documents, document: int, wanted: int, rng: random.Random) -> tuple[int, int]:
    """From a random sentence on, as many whole sentences as it takes to hold `wanted` pieces, at least one."""
    bounds = [0, *documents.sentence_ends(document).tolist()]
    first = int(rng.random() * (len(bounds) - 1))
    last = first
    while last < len(bounds) - 2 and bounds[last + 1] - bounds[first] < wanted:
        last += 1
    return bounds[first], bounds[last + 1]


def _cut_to_fit(
    a: tuple[int, int], b: tuple[int, int], longest: int, rng: random.Random
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The original's `truncate_seq_pair`: pieces go from the longer span, from its front or back by a coin's fall."""
    length_a, length_b = a[1] - a[0], b[1] - b[0]
    surplus = length_a + length_b - longest
    if surplus <= 0:
        return a, b
    from_longer = min(surplus, abs(length_a - length_b))
    rest = surplus - from_longer
    from_a, from_b = rest // 2, rest - rest // 2  # at equal lengths the second span gives the first piece
    if length_a > length_b:
        from_a += from_longer
    else:
        from_b += from_longer

    def cut(span: tuple[int, int], surplus: int) -> tuple[int, int]:
        front = rng.getrandbits(surplus).bit_count() if surplus else 0
        return span[0] + front, span[1] - (surplus - front)

    return cut(a, from_a), cut(b, from_b)


def sample_count(index: NDArray[np.int64], seq_len: int) -> int:
    """How many samples an index holds."""
    return len(index)


def look_up(index: NDArray[np.int64], samples: NDArray[np.int64], seq_len: int) -> NDArray[np.int64]:
    """int64 (B, 7): the index's rows."""
    return index[samples]


def spans(documents: Documents, row: NDArray[np.int64], seq_len: int) -> list[tuple[int, int, int]]:
    """(document, start, stop) of a sample's two segments."""
    document, start, stop, other, other_start, other_stop, _ = row.tolist()
    return [(document, start, stop), (other, other_start, other_stop)]


def assemble(
    documents: Documents,
    rows: NDArray[np.int64],
    keys: UInt64,
    seq_len: int,
    tokenizer: TokenizerInfo,
    mask_rate: float,
) -> Batch:
    """The model's inputs for some samples, as long as the longest of them: [CLS] a [SEP] b [SEP], masked.

    Args:
        rows: int64 (B, 7), rows of the index.
        keys: uint64 (B,), what each sample's mask is drawn from.
    """
    special = tokenizer.special_ids
    lengths = rows[:, 2] - rows[:, 1] + rows[:, 5] - rows[:, 4] + SPECIALS_A_PAIR
    input_ids = np.full((len(rows), int(lengths.max())), special["pad"], np.int64)
    segments = np.zeros_like(input_ids)
    for line, (document, start, stop, other, other_start, other_stop, _) in enumerate(rows.tolist()):
        middle = 1 + stop - start
        input_ids[line, 0] = special["cls"]
        input_ids[line, 1:middle] = documents.tokens(document)[start:stop]
        input_ids[line, middle] = special["sep"]
        input_ids[line, middle + 1 : lengths[line] - 1] = documents.tokens(other)[other_start:other_stop]
        input_ids[line, lengths[line] - 1] = special["sep"]
        segments[line, middle + 1 : lengths[line]] = 1
    masked, masked_at, masked_ids = mask_pieces(input_ids, lengths, keys, mask_rate, special, tokenizer.vocab_size)
    return Batch(
        inputs={
            "input_ids": masked,
            "segments": segments,
            "lengths": lengths,
            "masked_at": masked_at,
            "masked_ids": masked_ids,
            "is_random_next": rows[:, 6].copy(),
        },
        targets=masked_ids,
        counts={"token": len(masked_ids), "nsp": len(rows)},
        tokens=int(lengths.sum()),
    )
