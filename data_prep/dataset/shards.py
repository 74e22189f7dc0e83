"""Token shards: memory-mapped Arrow files with a row per document; the shards of a split form one sequence."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from multihop.common.errors import UserError
from multihop.common.files import open_regular
from multihop.data_prep.dataset.manifest import Manifest, Shard, read_data_manifest

SHARD_BYTES = 256 * 2**20
MAX_MAPPED = 2**12
"""Shards of a split that are mapped at a time, a terabyte. Linux allows a process 65,530 mappings by default
(vm.max_map_count), and mapping 100,000 shards takes half a minute."""


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return uint16 if every id fits, else uint32."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def shard_schema(dtype: str) -> pa.Schema:
    """Return the schema of a row per document; `tokens` has no special tokens, `sentence_ends` are offsets into it."""
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


def list_array(offsets: np.ndarray, values: np.ndarray, kind: pa.ListType) -> pa.ListArray:
    """Build a list column whose row i is values[offsets[i]:offsets[i + 1]]."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values, kind.value_type), type=kind)


def write_shard(path: Path, batches: list[pa.RecordBatch]) -> None:
    """Write `batches` as one record batch, so that each column is contiguous when mapped."""
    table = pa.Table.from_batches(batches).combine_chunks()
    assert table.num_rows > 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def count_tokens(shard: tuple[str, int]) -> np.ndarray:
    """Return int64 (vocab_size,): the number of occurrences of each id in `shard`, (path, vocab_size)."""
    path, vocab_size = Path(shard[0]), shard[1]
    values = _MappedShard(path).tokens.values
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(values), 2**22):  # bincount converts its input to int64
        counts += np.bincount(values[start : start + 2**22], minlength=vocab_size)
    return counts


def count_target_tokens(shard: tuple[str, int]) -> np.ndarray:
    """Count as `count_tokens`, but only the target sides of pairs."""
    path, vocab_size = Path(shard[0]), shard[1]
    mapped = _MappedShard(path)
    offsets, ends = mapped.tokens.offsets.astype(np.int64), mapped.sentence_ends.values.reshape(-1, 2)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(ends), 2**16):
        rows = slice(start, start + 2**16)
        first, last = offsets[start], offsets[start + len(ends[rows])]
        # +1 where a target side begins, -1 where it ends.
        edges = np.zeros(last - first + 1, np.int8)
        np.add.at(edges, offsets[:-1][rows] - first + ends[rows, 0], 1)
        np.add.at(edges, offsets[:-1][rows] - first + ends[rows, 1], -1)
        is_target = np.cumsum(edges[:-1], dtype=np.int8) > 0
        counts += np.bincount(mapped.tokens.values[first:last][is_target], minlength=vocab_size)
    return counts


class _Lists:
    """Views a list column as two numpy arrays: row i is values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, column: pa.ListArray) -> None:
        # A column read from a file starts at row 0; `.offsets` and `.values` are views of the mapped memory.
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

    @property
    def size(self) -> tuple[int, int]:
        """Number of documents and tokens; reads neither."""
        return len(self.ids), int(self.tokens.offsets[-1] - self.tokens.offsets[0])


def _count_target_repeats(shard: _MappedShard) -> np.ndarray:
    """Return int64 (rows,), as `Documents.target_repeats`."""
    offsets, ends = shard.tokens.offsets.astype(np.int64), shard.sentence_ends.values.reshape(-1, 2).astype(np.int64)
    counts = []
    for start in range(0, len(ends), 2**16):
        first, stop = offsets[start], offsets[min(start + 2**16, len(ends))]
        tokens = shard.tokens.values[first:stop]
        up_to = np.concatenate([[0], np.cumsum(tokens[1:] == tokens[:-1])])
        begins = offsets[:-1][start : start + 2**16] - first
        source, end = ends[start : start + 2**16].T
        counts.append(up_to[begins + end - 1] - up_to[begins + source])
    return np.concatenate([np.empty(0, np.int64), *counts])


def _map_shard(path: Path) -> _MappedShard:
    try:
        return _MappedShard(path)
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is damaged ({reason}); run `multihop prep` again to rebuild it") from None


class Documents:
    """The documents of a split, as one sequence over its shards with O(log shards) access."""

    def __init__(
        self,
        paths: list[Path],
        expected: list[tuple[int, int]] | None = None,
        await_shard: Callable[[Path], None] | None = None,
    ) -> None:
        """Map shards.

        Args:
            paths: the shards, in order.
            expected: number of documents and tokens of each shard; None: any numbers.
            await_shard: waits until a shard is on the disk. It is called before a shard is mapped, when it is first
                read; shards that were removed are unmapped then. None: all shards exist. They are mapped now, or when
                they are first read if there are more than `MAX_MAPPED`.

        Raises:
            UserError: a shard is damaged, or not as expected.
        """
        assert expected is not None or await_shard is None
        self._paths, self._expected, self._await_shard = paths, expected, await_shard
        self._mapped: dict[int, _MappedShard] = {}
        if expected is None or (await_shard is None and len(paths) <= MAX_MAPPED):
            self._mapped = {number: self._map(number) for number in range(len(paths))}
            expected = [shard.size for shard in self._mapped.values()]
        assert expected is not None
        self.shard_starts = [0, *accumulate(documents for documents, _ in expected)]
        """Index of each shard's first document in the whole split, and the number of documents."""
        self._rows = range(self.shard_starts[-1])

    def __len__(self) -> int:
        return len(self._rows)

    def of_source(self, source: int) -> tuple[int, "Documents"]:
        """Return the index of a source's first document in this sequence, and its documents, which are contiguous."""
        start, stop = (bisect_left(range(len(self)), source + above, key=self.source) for above in (0, 1))
        part = copy(self)
        for cached in ("lengths", "ids", "sources", "source_lengths", "target_repeats"):
            part.__dict__.pop(cached, None)
        part._rows = self._rows[start:stop]
        return start, part

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 (n,): number of tokens of each document. Unlike opening, this reads the offsets of all shards.

        Raises:
            UserError: a shard is damaged.
        """
        lengths = self._column(np.int64, lambda shard: np.diff(shard.tokens.offsets))
        if (lengths < 0).any():
            raise UserError("a shard is damaged (a document of it ends before it begins); run `multihop prep` again")
        return lengths

    @cached_property
    def source_lengths(self) -> np.ndarray:
        """int64 (n,): number of tokens of each pair's source side; the others are the target side's.

        Raises:
            UserError: the rows are not pairs, or a shard is damaged.
        """

        def read(shard: _MappedShard) -> np.ndarray:
            offsets, values, lengths = shard.sentence_ends.offsets, shard.sentence_ends.values, shard.tokens.offsets
            if (np.diff(offsets) != 2).any():
                raise UserError("the data set has documents, not pairs; give its sources pairs, or prepare another")
            ends: np.ndarray = values[offsets[0] : offsets[-1]].reshape(-1, 2).astype(np.int64)
            if ((ends[:, 0] < 1) | (ends[:, 0] >= ends[:, 1]) | (ends[:, 1] != np.diff(lengths))).any():
                raise UserError("a shard is damaged (a side of a pair has no token); run `multihop prep` again")
            return ends[:, 0]

        return self._column(np.int64, read)

    @cached_property
    def target_repeats(self) -> np.ndarray:
        """int64 (n,): how many tokens of each pair's target side equal the one before them. Reads all tokens.

        Raises:
            UserError: the rows are not pairs, or a shard is damaged.
        """
        self.source_lengths  # noqa: B018  # checks the sides
        return self._column(np.int64, _count_target_repeats)

    @cached_property
    def ids(self) -> np.ndarray:
        """uint64 (n,): the documents' stable ids (the first 8 bytes of the SHA-256 of the cleaned text)."""
        return self._column(np.uint64, lambda shard: shard.ids)

    @cached_property
    def sources(self) -> np.ndarray:
        """uint16 (n,), ascending: each document's index into the manifest's sources."""
        return self._column(np.uint16, lambda shard: shard.sources)

    @property
    def sentences(self) -> int:
        """Number of sentences of all documents."""
        return int(self._column(np.int64, lambda shard: np.diff(shard.sentence_ends.offsets)).sum())

    def tokens(self, i: int) -> np.ndarray:
        """Return uint16 or uint32 (length,): the tokens of document i, a view of the mapped file."""
        shard, row = self._find(i)
        return shard.tokens[row]

    def sentence_ends(self, i: int) -> np.ndarray:
        """Return uint32 (sentences,): the end of each sentence of document i in its tokens; the last is its length."""
        shard, row = self._find(i)
        return shard.sentence_ends[row]

    def sentences_in(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return int64 (stop - start,), the number of sentences of each of these documents, and uint32 (sentences,),
        their `sentence_ends` one after another."""
        counts, ends = [np.empty(0, np.int64)], [np.empty(0, np.uint32)]
        while start < stop:
            shard, row = self._find(start)
            end = min(row + stop - start, len(shard.ids))
            offsets = shard.sentence_ends.offsets[row : end + 1]
            counts.append(np.diff(offsets).astype(np.int64))
            ends.append(shard.sentence_ends.values[offsets[0] : offsets[-1]])
            start += end - row
        return np.concatenate(counts), np.concatenate(ends)

    def source(self, i: int) -> int:
        """Document i's index into the manifest's sources."""
        shard, row = self._find(i)
        return int(shard.sources[row])

    def _shard(self, number: int) -> _MappedShard:
        if number not in self._mapped:
            if self._await_shard is not None:
                for other in [other for other in self._mapped if not self._paths[other].exists()]:
                    del self._mapped[other]  # its disk space is free only then
                self._await_shard(self._paths[number])
            while len(self._mapped) >= MAX_MAPPED:
                del self._mapped[next(iter(self._mapped))]  # arrays of it that are in use keep the mapping
            self._mapped[number] = self._map(number)
        return self._mapped[number]

    def _map(self, number: int) -> _MappedShard:
        shard = _map_shard(self._paths[number])
        if self._expected is not None and shard.size != self._expected[number]:
            (documents, tokens), (expected_documents, expected_tokens) = shard.size, self._expected[number]
            raise UserError(
                f"{self._paths[number]} is damaged ({documents} documents with {tokens} tokens, expected "
                f"{expected_documents} with {expected_tokens}); run `multihop prep` again to rebuild it"
            )
        return shard

    def _column(self, dtype: type[np.generic], read: Callable[[_MappedShard], np.ndarray]) -> np.ndarray:
        """Return one value for each document, given a function that reads those of a shard."""
        start, stop = self._rows.start, self._rows.stop
        first, last = bisect_right(self.shard_starts, start) - 1, bisect_left(self.shard_starts, stop)
        values = np.empty(stop - start, dtype)
        for number in range(first, last) if start < stop else ():
            begin, end = self.shard_starts[number : number + 2]
            low, high = max(start, begin), min(stop, end)
            values[low - start : high - start] = read(self._shard(number))[low - begin : high - begin]
        return values

    def _find(self, i: int) -> tuple[_MappedShard, int]:
        if not 0 <= i < len(self._rows):
            raise IndexError(f"document {i} of {len(self._rows)}")
        row = self._rows[i]
        number = bisect_right(self.shard_starts, row) - 1
        return self._shard(number), row - self.shard_starts[number]


@dataclass(frozen=True)
class TokenDataset:
    """Holds a prepared data set, memory-mapped."""

    manifest: Manifest
    train: Documents
    heldout: Documents


def open_dataset(folder: str | Path, await_shard: Callable[[Path], None] | None = None) -> TokenDataset:
    """Map the data set in `folder`: reads the manifest and the size of each shard, but no tokens. The footers of more
    than `MAX_MAPPED` shards are read only with their documents.

    `verify_dataset` hashes the files; a start of a run does so for those that changed, before its ranks call this.

    Args:
        await_shard: waits for shards of the training split, as for `Documents`; None: all exist.

    Raises:
        UserError: a file, which the message names, is missing, truncated or does not match the manifest.
    """
    folder = Path(folder)
    manifest = read_data_manifest(folder)
    await_by_split = {"train": await_shard, "heldout": None}
    for shard in manifest.shards:
        if await_by_split[shard.split] is None:
            _check_size(folder, shard)
    splits = {split: _open_split(folder, manifest.of_split(split), wait) for split, wait in await_by_split.items()}
    # Replacing a data set by another removes the manifest first, so the mapped files are those of this manifest.
    if read_data_manifest(folder).fingerprint != manifest.fingerprint:
        raise UserError(f"{folder} was replaced by another data set while it was opened; open it again")
    return TokenDataset(manifest, splits["train"], splits["heldout"])


def _check_size(folder: Path, shard: Shard) -> None:
    path = folder / shard.file
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); run `multihop prep` again") from None
    if size != shard.bytes:
        raise UserError(f"{path} has {size} bytes, expected {shard.bytes}; run `multihop prep` again to rebuild it")


def _open_split(folder: Path, shards: list[Shard], await_shard: Callable[[Path], None] | None) -> Documents:
    sizes = [(shard.documents, shard.tokens) for shard in shards]
    return Documents([folder / shard.file for shard in shards], sizes, await_shard)
