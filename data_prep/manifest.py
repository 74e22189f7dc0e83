"""`manifest.json` of a prepared data set: what is in it, whether it is whole, and its fingerprint."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_prep.files import sha256_json, write_atomically

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
TOKENIZER_JSON = "tokenizer.json"
TOKEN_COUNTS = "token_counts.npy"

TokenizerKind = Literal["unigram", "bpe", "wordpiece", "byte-bpe"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Shard(_Part):
    """One Arrow file of token rows."""

    file: str
    split: Literal["train", "heldout"]
    documents: int
    tokens: int
    bytes: int
    """Size of the file."""
    sha256: str


class TokenizerInfo(_Part):
    """All that training needs to know of the tokenizer without loading it."""

    file: str = TOKENIZER
    """tokenizer.model is SentencePiece's, tokenizer.json as the library tokenizers spells WordPiece and byte-bpe."""
    kind: TokenizerKind
    vocab_size: int
    sha256: str
    special_ids: dict[str, int]
    """Masked models': pad, unk, cls, sep, mask; decoders': end, and unk if there is one."""
    word_start: str
    """One bit a piece in hex, the first piece in the highest bit, padded with zeros to whole bytes:
    set where a word begins with the piece."""


class TokenCounts(_Part):
    """A .npy file, int64 (vocab_size,): how often each id occurs in the train shards."""

    file: str = TOKEN_COUNTS
    sha256: str


class SetAside(_Part):
    """A file, or a place in a file, that was not used."""

    path: str
    reason: str


class Totals(_Part):
    """Sums over the shards of one split."""

    documents: int
    sentences: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents' sentences."""


class Manifest(_Part):
    """Written last: a folder without it holds no data set."""

    format_version: Literal[1] = 1
    fingerprint: str
    inputs: str
    """SHA-256 over settings, names and contents of the input: whether the data set is still that of its sources."""
    tokenizer: TokenizerInfo
    token_dtype: Literal["uint16", "uint32"]
    shards: list[Shard]
    token_counts: TokenCounts
    totals: dict[Literal["train", "heldout"], Totals]
    settings: dict[str, Any]
    """The recipe's `data` and `tokenizer` sections."""
    counts: dict[str, dict[str, int]] = Field(default_factory=dict)
    """By stage and reason: how much was read, dropped and kept."""
    set_aside: list[SetAside] = Field(default_factory=list)
    sources: list[str]
    """Paths of the sources; a row's `source` is an index into it."""

    def of_split(self, split: str) -> list[Shard]:
        """The shards of "train" or "heldout", in order."""
        return [shard for shard in self.shards if shard.split == split]


def data_fingerprint(tokenizer_sha256: str, token_dtype: str, shards: list[Shard]) -> str:
    """SHA-256 over the content: tokenizer, shards in order and format; never paths, times or worker counts."""
    return sha256_json(
        {
            "format": {"version": 1, "token_dtype": token_dtype},
            "tokenizer": tokenizer_sha256,
            "shards": [[shard.split, shard.sha256] for shard in shards],
        }
    )


def word_start_flags(tokenizer: TokenizerInfo) -> np.ndarray:
    """bool (vocab_size,): true where a word begins with the piece. Special pieces are false."""
    packed = np.frombuffer(bytes.fromhex(tokenizer.word_start), dtype=np.uint8)
    return np.unpackbits(packed, count=tokenizer.vocab_size).astype(bool)


def pack_flags(flags: np.ndarray) -> str:
    """bool (n,) as the hex string that `word_start_flags` reads."""
    return np.packbits(flags).tobytes().hex()


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of the data set in `folder`.

    Raises ValueError when there is none, it does not parse, or its fingerprint is not that of its own entries.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} holds no prepared data set ({MANIFEST} is missing); run `multihop prep`") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path} is not valid ({where}: {first['msg']}); run `multihop prep` again") from None
    expected = data_fingerprint(manifest.tokenizer.sha256, manifest.token_dtype, manifest.shards)
    if manifest.fingerprint != expected:
        raise ValueError(f"{path} does not agree with its own fingerprint; run `multihop prep` again")
    return manifest


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Commit the data set in `folder`; every file that it names must stand there already."""
    write_atomically(Path(folder) / MANIFEST, (manifest.model_dump_json(indent=1) + "\n").encode())
