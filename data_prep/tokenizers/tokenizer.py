"""A tokenizer as its users see it: `load` gives that of a file of any kind, `describe` what training must know."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from data_prep.files import open_regular
from data_prep.manifest import MANIFEST, TOKENIZER, TOKENIZER_JSON, Manifest, TokenizerInfo, TokenizerKind, pack_flags
from data_prep.rules.sentences import LANGUAGE
from data_prep.tokenizers.special_pieces import find_special
from data_prep.tokenizers.word_cache import Ids, Lengths


class Tokenizer(Protocol):
    """Text to pieces and back. No text is a special piece: to it `[SEP]` is brackets and letters."""

    @property
    def kind(self) -> TokenizerKind: ...

    @property
    def vocab_size(self) -> int: ...

    def split(self, document: str, language: str = LANGUAGE) -> list[str]:
        """What of a document is encoded one by one: its sentences; for byte-bpe with all that stands between them.

        `language` is the ISO 639 code of the rules that end sentences.
        """

    def encode(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """The pieces of all texts one behind the other, int32, and how many each text has, int64 (texts,)."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of pieces, as far as they hold it."""

    def id_to_piece(self, i: int) -> str:
        """As the vocabulary spells it."""

    def piece_text(self, i: int) -> str:
        """As it stands in a text, with a blank before it where a word begins."""

    def begins_word(self, i: int) -> bool:
        """Whether a word, or the white space before it, begins with the piece."""


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a data set's file. Raises ValueError when the file holds none."""
    try:
        with open_regular(path) as file:
            return parse(file.read())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a tokenizer ({error}); run `multihop prep` again") from None


def parse(content: bytes) -> Tokenizer:
    """The tokenizer of a file's bytes: a SentencePiece model, or a tokenizer.json of BERT's or GPT-2's kind.

    Raises ValueError when they are neither.
    """
    if content.startswith(b"{"):
        from data_prep.tokenizers.tokenizer_json import parse_json

        return parse_json(content)
    from data_prep.tokenizers.sentence_piece import SentencePiece

    return SentencePiece(content)


def describe(content: bytes, sha256: str) -> TokenizerInfo:
    """What training must know of the tokenizer with these bytes, without loading it.

    Raises ValueError when it lacks special pieces.
    """
    tokenizer = parse(content)
    ids = range(tokenizer.vocab_size)
    special_ids = find_special([tokenizer.id_to_piece(i) for i in ids])
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


def info_complaint(folder: Path, manifest: Manifest) -> str | None:
    """A sentence when what the manifest says of its tokenizer is not what the tokenizer's file, which is whole, says.

    So the fingerprint, in which the file's hash is, covers the special ids, the word starts and the vocabulary's size.
    """
    path = folder / manifest.tokenizer.file
    with open_regular(path) as file:
        found = describe(file.read(), manifest.tokenizer.sha256)
    if found == manifest.tokenizer:
        return None
    return f"{folder / MANIFEST} says other things of the tokenizer than {path} itself; run `multihop prep` again"
