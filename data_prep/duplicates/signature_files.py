"""Writes and reads the signatures and band hashes of a split's documents, in files that are read in slices.

A file consists of sorted runs, record batches of at most RUN_DOCUMENTS documents:

    row, bytes, document, signature     of each document with words, in the order of the split
    hash B, place B                     the hashes of band B, ascending, and the index in the run of each one's document
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from multihop.data_prep.config import NearDuplicatesConfig
from multihop.data_prep.duplicates.minhash import band_hashes, choose_bands, low_bytes, signatures
from multihop.data_prep.stages.documents import read_documents
from multihop.data_prep.stages.outputs import Output, write_batches, write_once

RUN_DOCUMENTS = 2**18
"""Most documents of a sorted run. Signing holds about 1.7 KB for each: 450 MB."""
_SIGNED_AT_ONCE = 8192
"""Documents whose signatures are computed at once, with 2.5 KB for each."""


@dataclass(frozen=True)
class SignSplit:
    """Sign the documents of a split (as `read_split` writes it) that are not `dropped`: FOLDER/KEY.arrow."""

    key: str
    folder: str
    path: str
    dropped: np.ndarray
    """int64, ascending: rows that are copies."""
    config: NearDuplicatesConfig


def band_count(config: NearDuplicatesConfig) -> int:
    """Return the number of bands of a signature."""
    return config.bands or choose_bands(config.threshold, config.permutations)


def signature_bytes(config: NearDuplicatesConfig) -> int:
    """Bytes on disk per signed document: row, bytes, document, signature, and for each band a hash and an index."""
    return 4 + 4 + 8 + config.permutations + (8 + 4) * band_count(config)


def sign_split(item: SignSplit) -> Output:
    """Sign a split. Metadata: "documents" with a signature, and "no words", documents without one, which are kept."""
    folder = Path(item.folder)
    bands = band_count(item.config)

    def write(path: Path) -> dict[str, Any]:
        metadata = {"documents": 0, "no words": 0}
        write_batches(path, _signed_schema(item.config.permutations, bands), _runs(item, bands, metadata), None)
        return metadata

    return write_once(folder / f"{item.key}.json", folder / f"{item.key}.arrow", write)


def kept_rows(dropped: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return int64 (stop - start,): rows of the `start`-th to `stop`-th document that is not in the rows `dropped`."""
    left = np.arange(start, stop)
    return left + np.searchsorted(dropped - np.arange(len(dropped)), left, side="right")


class Signatures:
    """Maps the files of all splits; a document's code is split << 32 | index among the split's signed documents."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.runs: list[list[pa.RecordBatch]] = []
        for path in paths:
            with pa.memory_map(path) as mapped:  # the batches keep the mapping, not the open file
                reader = pa.ipc.open_file(mapped)
                self.runs.append([reader.get_batch(number) for number in range(reader.num_record_batches)])

    def take(self, codes: np.ndarray, name: str) -> np.ndarray:
        """Return a column's values for documents; signatures as uint8 (documents, permutations)."""
        if not len(codes):
            return np.empty(0, np.uint64)
        order = np.argsort(codes)
        runs, bounds = np.unique(codes[order] // RUN_DOCUMENTS, return_index=True)
        parts = []
        for run, at in zip(runs.tolist(), np.split(order, bounds[1:]), strict=True):
            split, number = divmod(run, 2**32 // RUN_DOCUMENTS)
            parts.append(column_of(self.runs[split][number], name)[codes[at] % RUN_DOCUMENTS])
        taken = np.empty((len(codes), *parts[0].shape[1:]), parts[0].dtype)
        taken[order] = np.concatenate(parts)
        return taken


def column_of(run: pa.RecordBatch, name: str) -> np.ndarray:
    """Return a column of a run, without a copy."""
    column = run.column(name)
    if not pa.types.is_fixed_size_binary(column.type):
        return column.to_numpy()
    return np.frombuffer(column.buffers()[1], np.uint8).reshape(len(column), column.type.byte_width)


def _signed_schema(permutations: int, bands: int) -> pa.Schema:
    fields = {"row": pa.uint32(), "bytes": pa.uint32(), "document": pa.uint64(), "signature": pa.binary(permutations)}
    for band in range(bands):
        fields |= {f"hash {band}": pa.uint64(), f"place {band}": pa.uint32()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields.items()])


def _runs(item: SignSplit, bands: int, metadata: dict[str, int]) -> Iterator[pa.RecordBatch]:
    schema = _signed_schema(item.config.permutations, bands)
    waiting: list[tuple[np.ndarray, ...]] = []

    def run(columns: list[np.ndarray]) -> pa.RecordBatch:
        *plain, signature, hashes = columns
        arrays = [pa.array(column) for column in plain]
        arrays.append(
            pa.FixedSizeBinaryArray.from_buffers(
                schema.field("signature").type, len(signature), [None, pa.py_buffer(np.ascontiguousarray(signature))]
            )
        )
        for of_band in hashes.T:
            order = np.argsort(of_band, kind="stable")
            arrays += [pa.array(of_band[order]), pa.array(order.astype(np.uint32))]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def cut(documents: int) -> list[np.ndarray]:
        joined = [np.concatenate(column) for column in zip(*waiting, strict=True)]
        waiting[:] = [tuple(column[documents:] for column in joined)]
        return [column[:documents] for column in joined]

    seen = 0
    for batch in _slices(read_documents(item.path, item.dropped)):
        values, filled = signatures(batch.column("text"), item.config.shingle_words, item.config.permutations)
        rows = kept_rows(item.dropped, seen, seen + batch.num_rows)
        seen += batch.num_rows
        values = values[filled]
        metadata["documents"] += len(values)
        metadata["no words"] += batch.num_rows - len(values)
        sizes, ids = (batch.column(name).to_numpy()[filled] for name in ("bytes", "first"))
        waiting.append((rows[filled].astype(np.uint32), sizes, ids, low_bytes(values), band_hashes(values, bands).T))
        while sum(len(rows) for rows, *_ in waiting) >= RUN_DOCUMENTS:
            yield run(cut(RUN_DOCUMENTS))
    if sum(len(rows) for rows, *_ in waiting):
        yield run(cut(RUN_DOCUMENTS))


def _slices(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    # A batch may hold millions of documents of one word.
    for batch in batches:
        for start in range(0, batch.num_rows, _SIGNED_AT_ONCE):
            yield batch.slice(start, _SIGNED_AT_ONCE)
