"""Tokens of a text, each with the characters of the words that it belongs to.

A tokenizer gives ids without their offsets. A stretch of text between whitespace is encoded as in pretraining; if its
tokens spell it out, each token's offset is known. Otherwise (lowercase, unknown characters, a character split into
bytes) its words are encoded one by one. Offsets are rounded to whole words, as in the `run_squad.py` of Devlin et al.
2018: few answers begin or end within a word.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from multihop.data_prep.tokenizers.tokenizer import Tokenizer

_STRETCH = re.compile("[wp]+")
_WORD = re.compile("w+|p")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text, without special tokens."""

    ids: NDArray[np.int64]
    """(C,)."""
    starts: NDArray[np.int64]
    """(C,), in characters of the text: where each token's first word begins; never decreases."""
    ends: NDArray[np.int64]
    """(C,), in characters of the text: where each token's last word ends, exclusive; never decreases."""


class _Classes(dict[int, str]):
    """The class of a code point: " " whitespace, "p" punctuation as in BERT's WordPiece, "w" anything else."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_ascii_sign = character.isascii() and character.isprintable() and not character.isalnum()
        is_punctuation = is_ascii_sign or unicodedata.category(character).startswith("P")
        self[code] = kind = " " if character.isspace() else "p" if is_punctuation else "w"
        return kind


_CLASSES = _Classes()

_StretchTokens = tuple[list[int], list[int], list[int]]
"""Ids, starts and ends of the tokens of a stretch, in characters of the stretch."""


def tokens_with_offsets(texts: Sequence[str], tokenizer: Tokenizer) -> list[Tokens]:
    """Return the tokens of each text. Characters that the tokenizer drops have no token."""
    # In a byte-bpe vocabulary a word in a text starts with a space; other tokenizers take any text for a word's start.
    blank = " " if tokenizer.kind == "byte-bpe" else ""
    offsets, stretches = [], []
    for text in texts:
        spans = [match.span() for match in _STRETCH.finditer(text.translate(_CLASSES))]
        offsets.append([start for start, _ in spans])
        stretches.append([blank * (start > 0) + text[start:end] for start, end in spans])
    tokens_of = _encode_stretches(list(dict.fromkeys(chain.from_iterable(stretches))), tokenizer)
    return [
        _join(starts, [tokens_of[stretch] for stretch in line]) for starts, line in zip(offsets, stretches, strict=True)
    ]


def _join(offsets: list[int], parts: list[_StretchTokens]) -> Tokens:
    shift = np.repeat(np.array(offsets, np.int64), [len(ids) for ids, _, _ in parts])
    ids, starts, ends = (
        np.fromiter(chain.from_iterable(part[column] for part in parts), np.int64, len(shift)) for column in range(3)
    )
    return Tokens(ids, starts + shift, ends + shift)


def _encode_stretches(stretches: list[str], tokenizer: Tokenizer) -> dict[str, _StretchTokens]:
    """Return the tokens of each stretch, which may have a space before it."""
    tokens_of: dict[str, _StretchTokens] = {}
    by_words: dict[str, list[str]] = {}
    for stretch, ids in zip(stretches, _encode(stretches, tokenizer), strict=True):
        text = stretch.removeprefix(" ")
        words = [text[match.start() : match.end()] for match in _WORD.finditer(text.translate(_CLASSES))]
        spelled = [tokenizer.token_text(i) for i in ids]
        if spelled:
            spelled[0] = spelled[0].removeprefix(" ")
        if "".join(spelled) == text:
            tokens_of[stretch] = (ids, *_rounded(spelled, words))
        else:
            by_words[stretch] = [stretch[: -len(text)] + words[0], *words[1:]]
    unique = list(dict.fromkeys(chain.from_iterable(by_words.values())))
    ids_of = dict(zip(unique, _encode(unique, tokenizer), strict=True))
    for stretch, words in by_words.items():
        bounds = list(accumulate((len(word.removeprefix(" ")) for word in words), initial=0))
        counts = [len(ids_of[word]) for word in words]
        tokens_of[stretch] = (
            list(chain.from_iterable(ids_of[word] for word in words)),
            np.repeat(bounds[:-1], counts).tolist(),
            np.repeat(bounds[1:], counts).tolist(),
        )
    return tokens_of


def _rounded(spelled: list[str], words: list[str]) -> tuple[list[int], list[int]]:
    """Return the start of each token's first word and the end of its last one, in a stretch that tokens and words make
    up."""
    bounds = list(accumulate(map(len, words), initial=0))
    firsts = list(accumulate(map(len, spelled), initial=0))
    # A token of nothing but the space before a word belongs to that word.
    lasts = [first + max(0, len(token) - 1) for first, token in zip(firsts, spelled, strict=False)]
    return (
        [bounds[bisect_right(bounds, first) - 1] for first in firsts[:-1]],
        [bounds[bisect_right(bounds, last)] for last in lasts],
    )


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    ids, lengths = tokenizer.encode(texts)
    flat = ids.tolist()
    bounds = [0, *np.cumsum(lengths).tolist()]
    return [flat[start:end] for start, end in pairwise(bounds)]
