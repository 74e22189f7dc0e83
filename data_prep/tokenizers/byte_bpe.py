"""GPT-2's byte-level BPE, which encodes any text without loss, by Hugging Face tokenizers.

Radford et al. 2019, section 2.2: text is split into words (with the space before them), numbers, punctuation and
whitespace; the bytes of each are joined by the merges in the order in which these were learned. Before
that, added tokens that are not special, such as ModernBERT's runs of spaces, are matched in the text.

The library encodes stretches of whole words, whose tokens are cached. A text is cut where one of GPT-2's words is
certain to end and no added token can span the cut.
"""

import unicodedata
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import pairwise, product
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from multihop.data_prep.rules.sentences import LANGUAGE, split_sentences
from multihop.data_prep.tokenizers.hf_tokenizers import encode_each, matched_added_tokens
from multihop.data_prep.tokenizers.word_table import Ids, Lengths, WordTable

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

# Unicode's property White_Space; Python's str.isspace has four control characters more.
_SPACES = frozenset("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000").union(map(chr, range(0x2000, 0x200B)))


class ByteBPE:
    """Tokenizes by GPT-2's vocabulary and merges."""

    kind: Literal["byte-bpe"] = "byte-bpe"

    def __init__(self, hf_tokenizer: "Tokenizer", tokens: list[str]) -> None:
        """Wrap a library tokenizer.

        Args:
            tokens: the vocabulary in the order of the ids, spelled as in vocab.json, with all 256 bytes.
        """
        self._tokens = tokens
        self._added = hf_tokenizer.get_added_tokens_decoder()
        self._normalizes = hf_tokenizer.normalizer is not None
        self._may_be_in_added_token = _AddedTokenGuard(matched_added_tokens(hf_tokenizer))
        self._words = WordTable(partial(encode_each, hf_tokenizer), cuts=_cut_table(self._may_be_in_added_token))

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """Split the document at ends of sentences; the parts' tokens together are the document's.

        A part begins with the whitespace that follows the previous sentence. A sentence may end inside a part, where a
        split could change tokens.
        """
        if self._changes(document):
            return [document]
        starts, at = [0], 0
        for sentence in split_sentences(document, language):
            at = document.index(sentence, at) + len(sentence)
            around = document[at - 1 : at + 1]
            if len(around) == 2 and _may_end_sentence(*around) and not self._may_be_in_added_token(*around):
                starts.append(at)
        return [document[start:end] for start, end in pairwise([*starts, len(document)])]

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        # Added tokens may match only the normalized text, so such texts are not cut.
        changed = [i for i, text in enumerate(texts) if self._changes(text)]
        return self._words.encode([text.encode() for text in texts], changed)

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode([text])[0].tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[i] for i in ids).decode(errors="replace")

    def id_to_token(self, i: int) -> str:
        return self._tokens[i]

    def token_text(self, i: int) -> str:
        return self.decode([i])

    def begins_word(self, i: int) -> bool:
        return self._bytes[i][:1] in {b"\t", b"\n", b"\v", b"\f", b"\r", b" "}

    def _changes(self, text: str) -> bool:
        """Return whether the tokenizer's normalization changes the text."""
        return self._normalizes and not unicodedata.is_normalized("NFC", text)

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each token; the content of an added token is plain text."""
        return [
            token.encode()
            if i in self._added or not BYTES.keys() >= set(token)
            else bytes(BYTES[letter] for letter in token)
            for i, token in enumerate(self._tokens)
        ]


def _byte_letters() -> list[str]:
    """Return the letter by which a vocabulary spells each byte: itself if it is printable, else one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(unseen)) for byte in range(0x100)]


LETTERS = _byte_letters()
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


class _AddedTokenGuard:
    """Returns whether an added token may match across two characters, so that no text may be cut there."""

    def __init__(self, added: "list[AddedToken]") -> None:
        spelled = [(token, token.content) for token in added if token.content]
        spelled += [(token, unicodedata.normalize("NFC", content)) for token, content in spelled if token.normalized]
        self._within = {pair for _, content in spelled for pair in pairwise(content)}
        # Whether such a token matches depends on the surrounding characters, or it absorbs the spaces after it.
        looking = [content for token, content in spelled if token.single_word or token.rstrip]
        self._firsts, self._lasts = ({content[end] for content in looking} for end in (0, -1))
        self.are_ascii = all(content.isascii() for _, content in spelled)

    def __call__(self, before: str, after: str) -> bool:
        return (before, after) in self._within or after in self._firsts or before in self._lasts


def _may_end_sentence(before: str, after: str) -> bool:
    """Return whether a sentence can end between two characters of a text without changing its words.

    That is before whitespace, and between punctuation and a following letter or digit, except for the apostrophe, which
    may begin a contraction. The text before such a boundary does not affect the words after it.
    """
    if before in _SPACES:
        return False
    category = unicodedata.category(before)
    # A character that Python's tables have as unassigned may be assigned in newer ones.
    return after in _SPACES or (
        before != "'" and category[0] not in "LN" and category != "Cn" and unicodedata.category(after)[0] in "LN"
    )


def _cut_table(guard: _AddedTokenGuard) -> NDArray[np.bool_]:
    """Return bool (65536,), by two adjacent bytes, first + 256 * second: whether a text in UTF-8 is cut between them.

    Cuts are before whitespace that follows something else, and between letters, digits and punctuation of ASCII.
    """
    cuts = np.zeros((256, 256), bool)
    for before, after in product(map(chr, range(128)), repeat=2):
        cuts[ord(after), ord(before)] = _is_word_boundary(before, after) and not guard(before, after)
    if guard.are_ascii:
        for after in _SPACES & set(map(chr, range(128))):
            cuts[ord(after), 128:] = not guard(chr(128), after)
            cuts[ord(after), [space.encode()[-1] for space in _SPACES if not space.isascii()]] = False
    return cuts.ravel()


def _is_word_boundary(before: str, after: str) -> bool:
    """Return whether one of GPT-2's words is certain to end between two ASCII characters."""
    if before in _SPACES or after in _SPACES:
        return before not in _SPACES
    return "'" not in (before, after) and _kind(before) != _kind(after)


def _kind(character: str) -> str:
    return "L" if character.isalpha() else "N" if character.isdigit() else ""
