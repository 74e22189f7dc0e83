"""Token shards: Arrow files with one row a document, memory-mapped; several shards are seen as one sequence."""

import os
from bisect import bisect_left, bisect_right
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from data_prep.files import open_regular, sha256_file
from data_prep.manifest import Manifest, Shard, read_manifest

SHARD_BYTES = 256 * 2**20


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """uint16 where every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def shard_schema(dtype: str) -> pa.Schema:
    """One row a document; `tokens` holds no special pieces, `sentence_ends` are offsets into `tokens`."""
    return pa.schema(
        [
            pa.field("document", pa.uint64(), nullable=False),
            pa.field("source", pa.uint16(), nullable=False),
            pa.field(
                "tokens",
                pa.list_(pa.field("item", pa.from_numpy_dtype(np.dtype(dtype)), nullable=False)),
                nullable=False,
            ),
            pa.field("sentence_ends", pa.list_(pa.field("item", pa.uint32(), nullable=False)), nullable=False),
        ]
    )


def write_shard(path: Path, batches: list[pa.RecordBatch]) -> None:
    """Write `batches` as one record batch, so that each column is one run of memory when it is mapped."""
    table = pa.Table.from_batches(batches).combine_chunks()
    assert table.num_rows > 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def count_tokens(shard: tuple[str, int]) -> np.ndarray:
    """int64 (vocab_size,): how often each id occurs in the file of `shard`, (path, vocab_size)."""
    path, vocab_size = Path(shard[0]), shard[1]
    values = _MappedShard(path).tokens.values
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(values), 2**22):  # bincount widens its input eightfold
        counts += np.bincount(values[start : start + 2**22], minlength=vocab_size)
    return counts


class _Lists:
    """A list column as two numpy views: row i is values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, column: pa.ListArray) -> None:
        # A column read from a file starts at row 0; `.offsets` and `.values` share the mapped memory.
        self.offsets: np.ndarray = column.offsets.to_numpy(zero_copy_only=True)
        self.values: np.ndarray = column.values.to_numpy(zero_copy_only=True)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]


class _MappedShard:
    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as mapped:
            reader = pa.ipc.open_file(mapped)
            if reader.num_record_batches != 1 or reader.schema not in (shard_schema("uint16"), shard_schema("uint32")):
                raise pa.ArrowInvalid("its columns are not those of a shard")
            batch = reader.get_batch(0)
        batch.validate()
        self.ids = batch.column("document").to_numpy(zero_copy_only=True)
        self.sources = batch.column("source").to_numpy(zero_copy_only=True)
        self.tokens = _Lists(batch.column("tokens"))
        self.sentence_ends = _Lists(batch.column("sentence_ends"))


def _mapped(path: Path) -> _MappedShard:
    try:
        return _MappedShard(path)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged ({reason}); run `multihop prep` again to rebuild it") from None


class Documents:
    """The documents of one split, as one sequence over its shards; an index costs the same anywhere."""

    def __init__(self, paths: list[Path]) -> None:
        self._shards = [_mapped(path) for path in paths]
        self._starts = [0]
        for shard in self._shards:
            self._starts.append(self._starts[-1] + len(shard.ids))
        self._rows = range(self._starts[-1])

    def __len__(self) -> int:
        return len(self._rows)

    def sizes(self) -> list[tuple[int, int]]:
        """Documents and tokens of each shard, without reading either."""
        return [(len(shard.ids), int(shard.tokens.offsets[-1] - shard.tokens.offsets[0])) for shard in self._shards]

    def of_source(self, source: int) -> tuple[int, "Documents"]:
        """The documents of one source, which stand together, and the number of the first of them in this sequence."""
        start, stop = (bisect_left(range(len(self)), source + above, key=self.source) for above in (0, 1))
        part = copy(self)
        for cached in ("lengths", "ids", "sources"):
            part.__dict__.pop(cached, None)
        part._rows = self._rows[start:stop]
        return start, part

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 (n,): tokens of each document.

        Raises ValueError where a shard is damaged: unlike opening, this reads them all.
        """
        lengths = self._column(np.int64, [np.diff(shard.tokens.offsets) for shard in self._shards])
        if (lengths < 0).any():
            raise ValueError("a shard is damaged (a document of it ends before it begins); run `multihop prep` again")
        return lengths

    @cached_property
    def ids(self) -> np.ndarray:
        """uint64 (n,): the documents' stable ids (the first 8 bytes of the SHA-256 of the cleaned text)."""
        return self._column(np.uint64, [shard.ids for shard in self._shards])

    @cached_property
    def sources(self) -> np.ndarray:
        """uint16 (n,), ascending: which of the manifest's sources each document is from."""
        return self._column(np.uint16, [shard.sources for shard in self._shards])

    @property
    def sentences(self) -> int:
        """Of all documents."""
        return int(self._column(np.int64, [np.diff(shard.sentence_ends.offsets) for shard in self._shards]).sum())

    def tokens(self, i: int) -> np.ndarray:
        """uint16 or uint32 (length,): the tokens of document i, a view of the mapped file."""
        shard, row = self._find(i)
        return shard.tokens[row]

    def sentence_ends(self, i: int) -> np.ndarray:
        """uint32 (sentences,): where each sentence of document i ends in its tokens; the last is its length."""
        shard, row = self._find(i)
        return shard.sentence_ends[row]

    def source(self, i: int) -> int:
        """Which of the manifest's sources document i is from."""
        shard, row = self._find(i)
        return int(shard.sources[row])

    def _column(self, dtype: type[np.generic], parts: list[np.ndarray]) -> np.ndarray:
        column = np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)
        return column[self._rows.start : self._rows.stop]

    def _find(self, i: int) -> tuple[_MappedShard, int]:
        if not 0 <= i < len(self._rows):
            raise IndexError(f"document {i} of {len(self._rows)}")
        row = self._rows[i]
        k = bisect_right(self._starts, row) - 1
        return self._shards[k], row - self._starts[k]


@dataclass(frozen=True)
class TokenDataset:
    """A prepared data set, mapped."""

    manifest: Manifest
    train: Documents
    heldout: Documents


def open_dataset(folder: str | Path) -> TokenDataset:
    """Map the data set in `folder`: no token is read, files are only checked to be there and to have their sizes.

    Hashing them is for `verify_dataset`, and for each start of a run before its ranks come here.

    Raises ValueError with the file's name when one is missing, is cut, or is not what the manifest says.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    for shard in manifest.shards:
        _check_size(folder, shard)
    splits = {split: _open_split(folder, manifest.of_split(split)) for split in ("train", "heldout")}
    # Whoever replaces a data set by another takes the manifest away first: the files are those of this one.
    if read_manifest(folder).fingerprint != manifest.fingerprint:
        raise ValueError(f"{folder} became another data set while it was opened; open it again")
    return TokenDataset(manifest, splits["train"], splits["heldout"])


def verify_dataset(folder: str | Path) -> list[str]:
    """Hash every file of the data set in `folder`; one sentence for each that is bad, none when all is well."""
    folder = Path(folder)
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    return [sentence for file in dataset_files(folder, manifest) if (sentence := complaint(file))]


def dataset_files(folder: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """(path, SHA-256) of every file that the manifest names."""
    named = [(shard.file, shard.sha256) for shard in manifest.shards]
    named.append((manifest.tokenizer.file, manifest.tokenizer.sha256))
    named.append((manifest.token_counts.file, manifest.token_counts.sha256))
    return [(str(folder / file), sha256) for file, sha256 in named]


def complaint(file: tuple[str, str]) -> str | None:
    """A sentence when the file of (path, SHA-256) is missing or has other bytes."""
    path, sha256 = file
    try:
        found = sha256_file(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); run `multihop prep` again to rebuild it"
    if found != sha256:
        return f"{path} is damaged (its SHA-256 is {found[:12]}, not {sha256[:12]}); run `multihop prep` to rebuild it"
    return None


def _check_size(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); run `multihop prep` again") from None
    if size != shard.bytes:
        raise ValueError(f"{path} has {size} bytes, expected {shard.bytes}; run `multihop prep` again to rebuild it")


def _open_split(folder: Path, shards: list[Shard]) -> Documents:
    documents = Documents([folder / shard.file for shard in shards])
    for shard, (rows, tokens) in zip(shards, documents.sizes(), strict=True):
        if (rows, tokens) != (shard.documents, shard.tokens):
            raise ValueError(
                f"{folder / shard.file} is damaged (it holds {rows} documents with {tokens} tokens, the manifest says "
                f"{shard.documents} with {shard.tokens}); run `multihop prep` again to rebuild it"
            )
    return documents
