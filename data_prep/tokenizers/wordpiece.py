"""BERT's WordPiece: text is split at whitespace and punctuation, and each word greedily into its longest tokens.

Devlin et al. 2018, section 3, and the algorithm published with it (tokenization.py of google-research/bert). Its steps
look at one character at a time, or at the text between two spaces, so that encoded words can be cached.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from data_prep.rules.sentences import LANGUAGE, split_sentences
from data_prep.tokenizers.word_cache import Ids, Lengths
from data_prep.tokenizers.word_table import WordTable

CONTINUES = "##"
UNKNOWN = "[UNK]"
MAX_WORD_CHARS = 200
"""A longer word becomes one [UNK]: 200 in the published algorithm, 100 in Hugging Face's."""

_IDEOGRAPHS = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip
_ASCII_WORDS = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")


class WordPiece:
    """The tokenizer of a BERT vocabulary."""

    kind: Literal["wordpiece"] = "wordpiece"

    def __init__(self, tokens: list[str], lowercase: bool, max_word_chars: int = MAX_WORD_CHARS) -> None:
        """`tokens` in the order of their ids, without duplicates; they include [UNK]."""
        self._tokens = tokens
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._lowercase = lowercase
        self._max_word_chars = max_word_chars
        self._words = WordTable(lambda texts: map(self._encode, texts), b" \n")
        self._longest = max(map(len, tokens))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """Sentences; the whitespace between them has no token."""
        return split_sentences(document, language)

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return self._words.encode([text.encode() for text in texts])

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._tokens[i] for i in ids).replace(" " + CONTINUES, "")

    def id_to_token(self, i: int) -> str:
        return self._tokens[i]

    def token_text(self, i: int) -> str:
        token = self._tokens[i]
        return token.removeprefix(CONTINUES) if token.startswith(CONTINUES) else " " + token

    def begins_word(self, i: int) -> bool:
        return not self._tokens[i].startswith(CONTINUES)

    def _encode(self, text: str) -> list[int]:
        return [i for word in basic_words(text, self._lowercase) for i in self._cut(word)]

    def _cut(self, word: str) -> list[int]:
        """The longest token at the beginning of the word, then the longest of the rest, and so on."""
        unknown = [self._ids[UNKNOWN]]
        if len(word) > self._max_word_chars:
            return unknown
        found: list[int] = []
        start, continues = 0, ""
        while start < len(word):
            for end in range(min(len(word), start + self._longest), start, -1):
                i = self._ids.get(continues + word[start:end])
                if i is not None:
                    break
            else:
                return unknown
            found.append(i)
            start, continues = end, CONTINUES
        return found


def basic_words(text: str, lowercase: bool) -> list[str]:
    """Words, punctuation marks and ideographs of a text; lowercase and without accents if `lowercase`."""
    if text.isascii() and text.isprintable():
        return _ASCII_WORDS.findall(text.lower() if lowercase else text)
    words = []
    for word in "".join(map(_cleaned, text)).split():
        if lowercase:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
        words += "".join(f" {each} " if _is_punctuation(each) else each for each in word).split()
    return words


@lru_cache(maxsize=2**14)
def _cleaned(character: str) -> str:
    """Nothing for a control character, a space for any whitespace, an ideograph between spaces."""
    code, category = ord(character), unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if code in (0, 0xFFFD) or category in ("Cc", "Cf"):
        return ""
    return f" {character} " if any(first <= code <= last for first, last in _IDEOGRAPHS) else character


def _is_punctuation(character: str) -> bool:
    """Unicode punctuation, or any ASCII symbol."""
    return unicodedata.category(character).startswith("P") or (character.isascii() and character in _ASCII_SIGNS)


_ASCII_SIGNS = frozenset(map(chr, (*range(33, 48), *range(58, 65), *range(91, 97), *range(123, 127))))
