"""`manifest.json` of a prepared data set: what is in it, whether it is whole, and its fingerprint."""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from data_prep.files import canonical_json, json_object, open_regular, sha256_json, write_atomically

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.model"
TOKENIZER_JSON = "tokenizer.json"
TOKEN_COUNTS = "token_counts.npy"

TokenizerKind = Literal["unigram", "bpe", "wordpiece", "byte-bpe"]

_MOST_BYTES = 2**26
"""Of a manifest; that of a data set of 80 TB has as many. Parsed, one that is made up may take 24 times its size."""
_PlainName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""Of a file in the data set's folder, and in no other."""
_NPY_HEADER = 128
"""Bytes before the numbers of a .npy file with one dimension."""
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shard(_Part):
    """One Arrow file of token rows."""

    file: _PlainName
    split: Literal["train", "heldout"]
    documents: _Count
    tokens: _Count
    bytes: _Count
    """Size of the file."""
    sha256: _Hash


class TokenizerInfo(_Part):
    """All that training needs to know of the tokenizer without loading it."""

    file: _PlainName = TOKENIZER
    """tokenizer.model is SentencePiece's, tokenizer.json as the library tokenizers spells WordPiece and byte-bpe."""
    kind: TokenizerKind
    vocab_size: int = Field(ge=1, le=2**32)
    sha256: str
    special_ids: dict[str, _Count]
    """Masked models': pad, unk, cls, sep, mask; decoders': end, and unk if there is one."""
    word_start: str = Field(pattern="^[0-9a-f]*$")
    """One bit a piece in hex, the first piece in the highest bit, padded with zeros to whole bytes:
    set where a word begins with the piece."""

    @model_validator(mode="after")
    def _agree_on_the_vocabulary(self) -> Self:
        if len(self.word_start) != 2 * -(-self.vocab_size // 8):
            raise ValueError(f"word_start has {len(self.word_start)} digits, which are not those of vocab_size")
        if any(number >= self.vocab_size for number in self.special_ids.values()):
            raise ValueError("an id of special_ids is not below vocab_size")
        return self


class TokenCounts(_Part):
    """A .npy file, int64 (vocab_size,): how often each id occurs in the train shards."""

    file: _PlainName = TOKEN_COUNTS
    sha256: _Hash


class SetAside(_Part):
    """A file, or a place in a file, that was not used."""

    path: str
    reason: str


class Totals(_Part):
    """Sums over the shards of one split."""

    documents: _Count
    sentences: _Count
    tokens: _Count
    text_bytes: _Count
    """UTF-8 bytes of the documents' sentences."""


class Manifest(_Part):
    """Written last: a folder without it holds no data set."""

    format_version: Literal[1, 2] = 2
    """In its first version the file has no hash of its own: `prepare` writes it anew."""
    fingerprint: _Hash
    inputs: _Hash
    """SHA-256 over settings, names and contents of the input: whether the data set is still that of its sources."""
    tokenizer: TokenizerInfo
    token_dtype: Literal["uint16", "uint32"]
    shards: list[Shard]
    token_counts: TokenCounts
    totals: dict[Literal["train", "heldout"], Totals]
    settings: dict[str, Any]
    """The recipe's `data` and `tokenizer` sections."""
    counts: dict[str, dict[str, _Count]] = Field(default_factory=dict)
    """By stage and reason: how much was read, dropped and kept."""
    set_aside: list[SetAside] = Field(default_factory=list)
    sources: list[str]
    """Paths of the sources; a row's `source` is an index into it."""

    def of_split(self, split: str) -> list[Shard]:
        """The shards of "train" or "heldout", in order."""
        return [shard for shard in self.shards if shard.split == split]


def data_fingerprint(tokenizer_sha256: str, token_dtype: str, shards: list[Shard]) -> str:
    """SHA-256 over the content: tokenizer, shards in order and format; never paths, times or worker counts.

    Special ids, word starts and vocab_size are covered by the tokenizer's hash: they are what `describe` finds in it.
    """
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

    Raises ValueError when there is none, it does not parse, or it is not as it was written.
    """
    path, again = Path(folder) / MANIFEST, "run `multihop prep` again"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, _MOST_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} holds no prepared data set ({MANIFEST} is missing); run `multihop prep`") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {again}") from None
    content = json_object(data, path, advice=again, most_bytes=_MOST_BYTES)
    version = content.get("format_version")
    if version not in (1, 2):
        raise ValueError(
            f"{path} is of format version {version}, known are 1 and 2; read it with the multihop that wrote it, or "
            f"{again}"
        )
    if version == 2:
        if not _is_as_written(data, content):
            raise ValueError(f"{path} is damaged (its own hash does not match); {again}")
        del content["sha256"]
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ValueError(f"{path} is not valid ({where}: {first['msg']}); {again}") from None
    expected = data_fingerprint(manifest.tokenizer.sha256, manifest.token_dtype, manifest.shards)
    if manifest.fingerprint != expected:
        raise ValueError(f"{path} does not agree with its own fingerprint; {again}")
    return manifest


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Commit the data set in `folder`; every file that it names must stand there already."""
    content = {**manifest.model_dump(mode="json"), "format_version": 2}
    write_atomically(Path(folder) / MANIFEST, _spelled(content))


def _is_as_written(data: bytes, content: dict[str, Any]) -> bool:
    try:
        return data == _spelled(content)
    except ValueError:  # JSON of ours has no NaN and no halves of characters
        return False


def _spelled(content: dict[str, Any]) -> bytes:
    """The file's bytes: canonical JSON with the SHA-256 of what is in it besides, so that each byte counts."""
    without = {key: value for key, value in content.items() if key != "sha256"}
    return canonical_json({**without, "sha256": sha256_json(without)})


def read_token_counts(folder: str | Path, manifest: Manifest) -> np.ndarray:
    """int64 (vocab_size,): how often each id occurs in the train shards.

    Raises ValueError when the file is missing or not as it was written.
    """
    path, size = Path(folder) / manifest.token_counts.file, _NPY_HEADER + 8 * manifest.tokenizer.vocab_size
    try:
        with open_regular(path) as file:
            data = file.read(size) if os.fstat(file.fileno()).st_size == size else b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); run `multihop prep` again") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != manifest.token_counts.sha256:
        raise ValueError(f"{path} is damaged; run `multihop prep` to rebuild it")
    return np.frombuffer(data[_NPY_HEADER:], np.int64)
