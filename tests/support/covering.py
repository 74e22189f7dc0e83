"""Choose some of all combinations of settings: few for `make test`, more for `make test-long`."""

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def three_way_combinations(combinations: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return a 3-way covering array: any three values that occur together in `combinations` do so in what is returned.

    It shows any fault that needs three settings at once.
    """
    shuffled = list(combinations)
    random.Random(0).shuffle(shuffled)
    left = {triple for each in shuffled for triple in _triples(each)}
    chosen = []
    for least in (10, 8, 6, 4, 2, 1):  # first those that bring many triples, as a greedy search would
        for each in shuffled:
            if len(new := _triples(each) & left) >= least:
                chosen.append(each)
                left -= new
    return chosen


def _triples(combination: Sequence[Any]) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(combination), 3))


def short_and_long(short: Iterable[Sequence[Any]], long: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the parameters of a test: those of `make test`, then the others, which are marked long."""
    first = list(short)
    others = [each for each in dict.fromkeys(map(tuple, long)) if each not in map(tuple, first)]
    return [
        pytest.param(*each, marks=marks, id="-".join(map(str, each)))
        for chosen, marks in ((first, []), (others, [pytest.mark.long]))
        for each in chosen
    ]
