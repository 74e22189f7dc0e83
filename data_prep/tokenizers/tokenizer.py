"""Defines the interface of a tokenizer, loads one from a file of any kind, and describes it for training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from multihop.common.errors import UserError
from multihop.common.files import open_regular
from multihop.data_prep.rules.sentences import LANGUAGE
from multihop.data_prep.tokenizers.info import TOKENIZER, TOKENIZER_JSON, TokenizerInfo, TokenizerKind, pack_flags
from multihop.data_prep.tokenizers.special_tokens import find_special_ids
from multihop.data_prep.tokenizers.word_table import Ids, Lengths


class Tokenizer(Protocol):
    """Converts text to token ids and back.

    Text is never parsed for special tokens: `[SEP]` in it is brackets and letters.
    """

    @property
    def kind(self) -> TokenizerKind: ...

    @property
    def vocab_size(self) -> int: ...

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """Split a document into the texts to encode: its sentences; for byte-bpe with everything between them.

        Args:
            language: the ISO 639 code of the rules for ends of sentences.
        """

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Return the token ids of all texts, concatenated, int32; and the number of tokens of each, int64 (texts,)."""

    def encode_continuation(self, text: str) -> list[int]:
        """Encode a text after a special token: it continues a word unless it begins with whitespace."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, as far as the tokens preserve it."""

    def id_to_token(self, i: int) -> str:
        """Return the token as the vocabulary spells it."""

    def token_text(self, i: int) -> str:
        """Return the token as text, with a space before it if it begins a word."""

    def begins_word(self, i: int) -> bool:
        """Return whether the token begins a word, or the whitespace before one."""


def load(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a data set.

    Raises:
        UserError: the file is not a tokenizer.
    """
    try:
        with open_regular(path) as file:
            return parse(file.read())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer ({error}); run `multihop prep` again") from None


def parse(content: bytes) -> Tokenizer:
    """Load the tokenizer in a file's bytes: a SentencePiece model, or a tokenizer.json of BERT's or GPT-2's kind.

    Raises UserError for anything else.
    """
    if content.startswith(b"{"):
        from multihop.data_prep.tokenizers.tokenizer_json import parse_json

        return parse_json(content)
    from multihop.data_prep.tokenizers.sentence_piece import SentencePiece

    return SentencePiece(content)


def describe(content: bytes, sha256: str, pairs: bool = False) -> TokenizerInfo:
    """Describe the tokenizer in a file's bytes, as training needs it.

    Args:
        pairs: look for the special tokens that pairs need, see `find_special_ids`.

    Raises:
        UserError: it lacks special tokens.
    """
    tokenizer = parse(content)
    ids = range(tokenizer.vocab_size)
    special_ids = find_special_ids([tokenizer.id_to_token(i) for i in ids], pairs)
    starts = np.array([tokenizer.begins_word(i) for i in ids])
    starts[list(special_ids.values())] = False
    return TokenizerInfo(
        file=TOKENIZER_JSON if content.startswith(b"{") else TOKENIZER,
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        sha256=sha256,
        special_ids=special_ids,
        word_start=pack_flags(starts),
    )


def encode_masked(tokenizer: Tokenizer, mask: int, text: str) -> list[int]:
    """Encode a text such as "The river [MASK] stone.", with `mask` where the mask token is spelled out.

    No other special tokens are added. A mask token replaces a word and the space before it: in "[MASK]." and
    "[MASK]ing" the rest continues that word.
    """
    first, *rest = text.split(tokenizer.id_to_token(mask))
    ids: list[int] = tokenizer.encode([first.rstrip() if rest else first])[0].tolist()
    for number, text_after in enumerate(rest, start=1):
        ids += [mask, *tokenizer.encode_continuation(text_after.rstrip() if number < len(rest) else text_after)]
    return ids
