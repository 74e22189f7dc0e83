"""GPT-2's byte-level BPE, which encodes any text without loss.

Radford et al. 2019, section 2.2, and the algorithm published with it (src/encoder.py of openai/gpt-2): text is split
into words (with the space before them), numbers, punctuation and whitespace; the bytes of each are joined by the merges
in the order in which these were learned.
"""

import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Literal

from data_prep.rules.sentences import LANGUAGE, split_sentences
from data_prep.tokenizers.word_cache import Ids, Lengths, WordCache

# Unicode's property White_Space; Python's \s has four control characters more.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


class ByteBPE:
    """The tokenizer of GPT-2's vocabulary and merges."""

    kind: Literal["byte-bpe"] = "byte-bpe"

    def __init__(self, tokens: list[str], merges: list[tuple[str, str]]) -> None:
        """`tokens` in the order of their ids, spelled as in vocab.json; they include all 256 bytes."""
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._words = WordCache(lambda words: map(self._join, words))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """Split the document at ends of sentences; the parts' tokens together are the document's.

        A part begins with the whitespace that follows the previous sentence. A sentence may end inside a part, where a
        split could change tokens.
        """
        cut, starts, at = _patterns(document.isascii())[1], [0], 0
        for sentence in split_sentences(document, language):
            at = document.index(sentence, at) + len(sentence)
            if cut.match(document, at):
                starts.append(at)
        return [document[start:end] for start, end in pairwise([*starts, len(document)])]

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return self._words.encode([_patterns(text.isascii())[0].findall(text) for text in texts])

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._tokens[i] for i in ids).translate(_BYTES).encode("latin-1").decode(errors="replace")

    def id_to_token(self, i: int) -> str:
        return self._tokens[i]

    def token_text(self, i: int) -> str:
        return self.decode([i])

    def begins_word(self, i: int) -> bool:
        return self._tokens[i].startswith(tuple(LETTERS[byte] for byte in b"\t\n\v\f\r "))

    def _join(self, word: str) -> list[int]:
        parts = [LETTERS[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, sys.maxsize) for pair in pairwise(parts)]
            first = min(ranks)
            if first == sys.maxsize:
                break
            joined: list[str] = []
            at = 0
            while at < len(parts):
                is_pair = at < len(ranks) and ranks[at] == first
                joined.append(parts[at] + parts[at + 1] if is_pair else parts[at])
                at += 1 + is_pair
            parts = joined
        return [self._ids[part] for part in parts]


def _letters() -> list[str]:
    """The letter by which a vocabulary spells each byte: itself if it is printable, else one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(0x100)]


LETTERS = _letters()
_BYTES = {ord(letter): byte for byte, letter in enumerate(LETTERS)}


@cache
def _patterns(is_ascii: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A pattern of the words that merges stay within, and one of the places where text can be split between words.

    These are before whitespace, and between punctuation and a following letter or digit, except for the apostrophe,
    which may begin a contraction. What comes before such a place does not affect the words after it.
    """
    letter, number = ("A-Za-z", "0-9") if is_ascii else (_ranges("L"), _ranges("N"))
    word = (
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?[{letter}]+| ?[{number}]+| ?[^{_SPACE}{letter}{number}]+"
        rf"|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
    )
    cut = rf"(?<=[^{_SPACE}])(?=[{_SPACE}])|(?<=[^{_SPACE}{letter}{number}'])(?=[{letter}{number}])"
    return re.compile(word), re.compile(cut)


def _ranges(category: str) -> str:
    """All characters of one of Unicode's major categories, as the inside of a pattern's brackets."""
    found = ""
    is_in = ((code, unicodedata.category(chr(code))[0] == category) for code in range(sys.maxunicode + 1))
    for inside, run in groupby(is_in, key=lambda each: each[1]):
        if inside:
            codes = [code for code, _ in run]
            found += f"\\U{codes[0]:08x}-\\U{codes[-1]:08x}"
    return found
