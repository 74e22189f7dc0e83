"""Texts as tokens, for scoring."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.zero_shot.scoring import Continuation


def encode_each(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, without special tokens."""
    assert texts
    ids, lengths = tokenizer.encode(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def encode_continuations(
    tokenizer: Tokenizer, special_ids: dict[str, int], context: str, continuations: Sequence[str]
) -> list[Continuation]:
    """A text and what may follow it, each with the space that separates the two if there is one.

    Context and continuation are encoded together. Tokens that all have in common with the context alone, after an end
    token, are the context: where a continuation changes the context's last token, that token is scored for all of them,
    so that their likelihoods remain comparable.

    Args:
        special_ids: of the run's tokenizer, with end.
    """
    alone, *together = encode_each(tokenizer, [context, *(context + each for each in continuations)])
    shared = min(sum(1 for _ in takewhile(_equal, zip(alone, each, strict=False))) for each in together)
    # Text for which the tokenizer has no token at all is as unlikely as an unknown one, not certain.
    nothing = [special_ids.get("unk", special_ids["end"])]
    before = [special_ids["end"], *alone[:shared]]
    return [Continuation(before, each[shared:] or nothing) for each in together]


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]
