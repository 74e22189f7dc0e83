"""Describes a tokenizer, so that training need not load it."""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from multihop.common.config import Count, FileName, Record
from multihop.common.errors import UserError

TOKENIZER = "tokenizer.model"
TOKENIZER_JSON = "tokenizer.json"
TARGET_TOKENIZER = "target_tokenizer.model"
TokenizerKind = Literal["unigram", "bpe", "wordpiece", "byte-bpe", "char"]


class AddedTokens(Record):
    """Describes the last tokens of a vocabulary, which were added to an existing one; see `add_words` and
    `add_tokens`."""

    base_sha256: str
    """SHA-256 of the existing tokenizer, as it was imported."""
    parts: list[list[Count]]
    """For each added token, in the order of their ids, the ids of the tokens that it was split into before."""
    tokens_before: Count
    """Number of tokens of the sample's words in the existing vocabulary, without words that have an unknown one; 0: not
    counted, as for `add_tokens`."""
    tokens_after: Count
    """Number of tokens of the same words with the added tokens."""


class TokenizerInfo(Record):
    """Describes a tokenizer, so that training need not load it."""

    file: FileName = TOKENIZER
    """tokenizer.model, a SentencePiece model; tokenizer.json, WordPiece or byte-bpe in tokenizers' format; or
    target_tokenizer.model, the SentencePiece model of the target sides of pairs, if it is another."""
    kind: TokenizerKind
    vocab_size: int = Field(ge=1, le=2**32)
    sha256: str
    special_ids: dict[str, Count]
    """Ids of pad, unk, cls, sep and mask for masked models; of end for decoders; of pad and end for pairs; and of unk
    if the vocabulary has it."""
    word_start: str = Field(pattern="^[0-9a-f]*$")
    """One bit per token in hex, the first token in the highest bit, padded with zeros to whole bytes; set for tokens
    that begin a word."""

    added: AddedTokens | None = Field(default=None, exclude_if=lambda added: added is None)
    """The tokens that were added to an existing vocabulary; None: none were."""

    @property
    def base_vocab_size(self) -> int:
        """Size of the vocabulary without added tokens."""
        return self.vocab_size - (len(self.added.parts) if self.added else 0)

    @model_validator(mode="after")
    def _agree_on_the_vocabulary(self) -> Self:
        if len(self.word_start) != 2 * -(-self.vocab_size // 8):
            raise UserError(f"word_start has {len(self.word_start)} digits, which does not fit vocab_size")
        if any(number >= self.vocab_size for number in self.special_ids.values()):
            raise UserError("an id of special_ids is >= vocab_size")
        parts = self.added.parts if self.added else []
        if not all(each and max(each) < self.base_vocab_size for each in parts):
            raise UserError("an added token has no part in the vocabulary without added tokens")
        return self


def word_start_flags(tokenizer: TokenizerInfo) -> np.ndarray:
    """Return bool (vocab_size,): true for tokens that begin a word; false for special tokens."""
    packed = np.frombuffer(bytes.fromhex(tokenizer.word_start), dtype=np.uint8)
    return np.unpackbits(packed, count=tokenizer.vocab_size).astype(bool)


def pack_flags(flags: np.ndarray) -> str:
    """Encode bool (n,) as the hex string that `word_start_flags` reads."""
    return np.packbits(flags).tobytes().hex()
