"""Sliding windows over a text that is longer than a model's positions."""

from collections.abc import Iterator

import numpy as np

from multihop.eval.zero_shot.scoring import Ids, Query


def windows(tokens: Ids, seq_len: int, stride: int) -> Iterator[Query]:
    """Cut a text so that each of its tokens but the first is predicted once.

    Each token is predicted from at least `seq_len - stride + 1` tokens before it where the text has as many.

    Args:
        tokens: int64 (T,).
        seq_len: tokens of a window.
        stride: distance between the beginnings of two windows, from 1 to `seq_len`.

    Yields:
        Queries, of which each predicts the tokens that the one before does not reach, in the order of the text.
    """
    assert 1 <= stride <= seq_len
    start, predicted = 0, 1
    while predicted < len(tokens):
        stop = min(start + seq_len + 1, len(tokens))
        yield Query(tokens[start : stop - 1], np.arange(predicted - 1, stop - 1) - start, tokens[predicted:stop])
        predicted = stop
        start += stride
