"""Examples as pieces: what a model is fed, and at which pieces it is asked."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from data_prep.tokenizers.tokenizer import Tokenizer
from eval.tasks import Example, Kind
from pretrain.keyed import key_of

_POOL_BATCHES = 16


@dataclass(frozen=True)
class Encoded:
    """One example as the model takes it."""

    ids: NDArray[np.int64]
    """(T,): [CLS] text [SEP] for BERT (Devlin et al. 2018, section 4), text and end for GPT-2."""
    asked_at: NDArray[np.int64]
    """(W,): where each word's first piece stands (Devlin et al. 2018, section 5.3); empty unless tagging. Words that
    were cut off are not in it."""
    targets: NDArray[np.float64]
    """The example's targets, all of them; for tagging one a word, also of those that were cut off."""


def encode(
    examples: Sequence[Example],
    kind: Kind,
    tokenizer: Tokenizer,
    special_ids: dict[str, int],
    seq_len: int,
) -> list[Encoded]:
    """Examples as pieces, cut to `seq_len`, special ones included.

    Args:
        special_ids: the data set's: `cls` and `sep` for BERT, `end` for GPT-2.
    """
    before = [special_ids["cls"]] if "cls" in special_ids else []
    after = [special_ids["sep" if "cls" in special_ids else "end"]]
    room = seq_len - len(before) - len(after)
    # To a byte-bpe a word in a text has a blank before it; the others take any text for the beginning of a word.
    blank = " " if tokenizer.kind == "byte-bpe" else ""
    texts = [blank * (number > 0) + text for example in examples for number, text in enumerate(example.texts)]
    ids_of_all, lengths = tokenizer.encode(texts)
    pieces = iter(np.split(ids_of_all, np.cumsum(lengths)[:-1]))
    nothing = [special_ids.get("unk", after[0])]
    encoded = []
    for example in examples:
        # A word that the tokenizer drops still has a label: it stands as the unknown piece.
        words = [next(pieces).tolist() or nothing for _ in example.texts]
        starts = np.cumsum([0, *(len(word) for word in words[:-1])])
        ids = [*before, *list(chain.from_iterable(words))[:room], *after]
        encoded.append(
            Encoded(
                ids=np.array(ids, np.int64),
                asked_at=starts[starts < room] + len(before) if kind == "tagging" else np.empty(0, np.int64),
                targets=np.array(example.targets, np.float64),
            )
        )
    return encoded


def batches(lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int) -> Iterator[NDArray[np.int64]]:
    """Every example once, in an order keyed by (seed, epoch), examples of similar length together.

    The examples are shuffled, cut into pools of a few batches, sorted by length within a pool, and the batches
    shuffled again: little padding, and no length comes always first.

    Args:
        lengths: int64 (N,), pieces of each example.

    Yields:
        int64 (at most batch_size,): indexes of examples.
    """
    rng = np.random.Generator(np.random.Philox(key_of("fine-tuning order", seed, epoch)))
    shuffled = rng.permutation(len(lengths))
    pool = batch_size * _POOL_BATCHES
    cut: list[NDArray[np.int64]] = []
    for start in range(0, len(shuffled), pool):
        drawn = shuffled[start : start + pool]
        drawn = drawn[np.argsort(lengths[drawn], kind="stable")]
        cut += [drawn[i : i + batch_size] for i in range(0, len(drawn), batch_size)]
    for index in rng.permutation(len(cut)):
        yield cut[index]
