"""`manifest.json` of a prepared data set: its files with their hashes, and its fingerprint."""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from multihop.common.config import Count, FileName, Record
from multihop.common.errors import UserError
from multihop.common.files import canonical_json, json_object, open_regular, sha256_json, write_atomically
from multihop.data_prep.tokenizers.info import TokenizerInfo

MANIFEST = "manifest.json"
TOKEN_COUNTS = "token_counts.npy"
MAX_BYTES = 2**26
"""Limit for a manifest, reached at about 80 TB of data. Parsing a malicious file may take 24 times its size. A
larger manifest is not written."""
_NPY_HEADER = 128
"""Bytes before the data of a one-dimensional .npy file."""
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Shard(Record):
    """Describes an Arrow file of tokenized documents."""

    file: FileName
    split: Literal["train", "heldout"]
    documents: Count
    tokens: Count
    bytes: Count
    """Size of the file."""
    sha256: _Hash


class TokenCounts(Record):
    """Describes a .npy file, int64 (vocab_size,): the number of occurrences of each id in the train shards.

    For pairs it counts the ids of `Manifest.output_tokenizer` on the target sides.
    """

    file: FileName = TOKEN_COUNTS
    sha256: _Hash


class SetAside(Record):
    """Names a file, or a document in a file, that was not used, with the reason."""

    path: str
    reason: str


class Totals(Record):
    """Holds sums over the shards of one split."""

    documents: Count
    sentences: Count
    tokens: Count
    text_bytes: Count
    """UTF-8 bytes of the sentences."""


class Manifest(Record):
    """The content of `manifest.json`, which is written last: a directory without it holds no data set."""

    format_version: Literal[2] = 2
    fingerprint: _Hash
    inputs: _Hash
    """SHA-256 of settings, names and contents of the input (`ResolvedInputs.identity`)."""
    tokenizer: TokenizerInfo
    token_dtype: Literal["uint16", "uint32"]
    shards: list[Shard]
    token_counts: TokenCounts
    totals: dict[Literal["train", "heldout"], Totals]
    settings: dict[str, Any]
    """The recipe's `data` and `tokenizer` sections."""
    counts: dict[str, dict[str, Count]] = Field(default_factory=dict)
    """Number of files or documents, by stage and outcome ("kept" or a reason)."""
    set_aside: list[SetAside] = Field(default_factory=list)
    """A sample of the bad files and documents: `counts` has the totals."""
    sources: list[str]
    """Paths of the sources; a row's `source` is an index into it."""
    # Left out of the file where they have their defaults: a manifest of documents has the same hash as before pairs.
    pairs: bool = Field(default=False, exclude_if=lambda pairs: not pairs)
    """True if a row is a pair: the tokens of its source side, then those of its target side, with their ends."""
    target_tokenizer: TokenizerInfo | None = Field(default=None, exclude_if=lambda info: info is None)
    """The tokenizer of the target sides, if it is not `tokenizer`."""

    @property
    def output_tokenizer(self) -> TokenizerInfo:
        """The tokenizer of what a model predicts; for pairs, that of the target sides."""
        return self.target_tokenizer or self.tokenizer

    @property
    def source_vocab_size(self) -> int | None:
        """Size of the source sides' vocabulary, if the target sides have another; else None."""
        return None if self.target_tokenizer is None else self.tokenizer.vocab_size

    @property
    def tokenizers_sha256(self) -> str:
        """The SHA-256 of the tokenizer, or of the hashes of both."""
        if self.target_tokenizer is None:
            return self.tokenizer.sha256
        return sha256_json([self.tokenizer.sha256, self.target_tokenizer.sha256])

    @property
    def tokenizers(self) -> list[TokenizerInfo]:
        """`tokenizer`, and `target_tokenizer` if there is one."""
        return [self.tokenizer, *([] if self.target_tokenizer is None else [self.target_tokenizer])]

    @property
    def number_set_aside(self) -> int:
        """Number of bad files, plus the number of bad documents in other files."""
        return sum(number for reason, number in self.counts.get("read", {}).items() if reason != "kept")

    def of_split(self, split: str) -> list[Shard]:
        """Return the shards of "train" or "heldout", in order."""
        return [shard for shard in self.shards if shard.split == split]


def data_fingerprint(
    tokenizer_sha256: str,
    token_dtype: str,
    shards: list[Shard],
    pairs: bool = False,
    target_tokenizer_sha256: str | None = None,
) -> str:
    """Return the SHA-256 of the content: tokenizers, shards in order, and format; not of paths, times or worker counts.

    Special ids, word starts and vocab_size are covered by the tokenizer's hash, since `describe` derives them from it.
    """
    content: dict[str, Any] = {
        "format": {"version": 1, "token_dtype": token_dtype},
        "tokenizer": tokenizer_sha256,
        "shards": [[shard.split, shard.sha256] for shard in shards],
    }
    if pairs:
        content["pairs"] = {"target_tokenizer": target_tokenizer_sha256}
    return sha256_json(content)


def read_data_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of the data set in `folder`.

    Raises:
        UserError: it is missing, malformed or damaged.
    """
    path, again = Path(folder) / MANIFEST, "run `multihop prep` again"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, MAX_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no prepared data set ({MANIFEST} is missing); run `multihop prep`") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {again}") from None
    content = json_object(data, path, advice=again, max_bytes=MAX_BYTES)
    version = content.get("format_version")
    if version != 2:
        raise UserError(
            f"{path} has format version {version}, expected 2; read it with the multihop that wrote it, or {again}"
        )
    if not _has_right_hash(data, content):
        raise UserError(f"{path} is damaged (its own hash does not match); {again}")
    del content["sha256"]
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path} is not valid ({where}: {first['msg']}); {again}") from None
    target = manifest.target_tokenizer
    expected = data_fingerprint(
        manifest.tokenizer.sha256,
        manifest.token_dtype,
        manifest.shards,
        manifest.pairs,
        None if target is None else target.sha256,
    )
    if manifest.fingerprint != expected:
        raise UserError(f"{path} is damaged (the fingerprint does not match its content); {again}")
    return manifest


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Commit the data set in `folder`, which must have all files that the manifest names.

    Raises:
        UserError: As for `encode_manifest`.
    """
    write_atomically(Path(folder) / MANIFEST, encode_manifest(manifest))


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as the bytes of its file.

    Raises:
        UserError: It is larger than `read_data_manifest` accepts.
    """
    content = _to_bytes(manifest.model_dump(mode="json"))
    if len(content) > MAX_BYTES:
        raise UserError(
            f"{MANIFEST} would have {len(content):,} bytes for {len(manifest.shards):,} shards of "
            f"{len(manifest.sources):,} sources, but the limit is {MAX_BYTES:,}; prepare several smaller data sets"
        )
    return content


def manifest_sha256(manifest: Manifest) -> str:
    """Return the hash that the manifest's file holds of its own content, as 64 hex digits."""
    return sha256_json(manifest.model_dump(mode="json"))


def _has_right_hash(data: bytes, content: dict[str, Any]) -> bool:
    try:
        return data == _to_bytes(content)
    except ValueError:  # NaN or half of a surrogate pair, which we never write
        return False


def _to_bytes(content: dict[str, Any]) -> bytes:
    """Encode as canonical JSON with the SHA-256 of the rest, so that any changed byte is detected."""
    without = {key: value for key, value in content.items() if key != "sha256"}
    return canonical_json({**without, "sha256": sha256_json(without)})


def read_token_counts(folder: str | Path, manifest: Manifest) -> np.ndarray:
    """Read int64 (vocab_size,), see `TokenCounts`.

    Raises:
        UserError: the file is missing or damaged.
    """
    path, size = Path(folder) / manifest.token_counts.file, _NPY_HEADER + 8 * manifest.output_tokenizer.vocab_size
    try:
        with open_regular(path) as file:
            data = file.read(size) if os.fstat(file.fileno()).st_size == size else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); run `multihop prep` again") from None
    if len(data) != size or hashlib.sha256(data).hexdigest() != manifest.token_counts.sha256:
        raise UserError(f"{path} is damaged; run `multihop prep` to rebuild it")
    return np.frombuffer(data[_NPY_HEADER:], np.int64)
