"""Texts of a part of a Parquet or Arrow file: a column, a batch of rows at a time.

A row group or record batch belongs to the part in which it begins. Parquet is read page by page; of an Arrow record
batch the text's column is held whole.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.failures import UnreadableFileError
from data_prep.opening import OpenedFile
from data_prep.sources import Part

_ROWS = 1024
_BATCH_BYTES = 8 * 2**20
_BUFFER = 2**20
_ARROW_FILE = b"ARROW1"

Value = str | bytes | None
"""bytes: not UTF-8; None: no text."""


def parquet_values(part: Part, opened: OpenedFile) -> Iterator[Value]:
    """The values of the text's column in the part's row groups.

    Raises UnreadableFileError, perhaps after some values, when the file is damaged or has no such column.
    """
    try:
        # Without a buffer or with pre_buffer, the column of a whole row group is fetched before its first row.
        source = pa.PythonFile(opened.stream(), "r")
        with pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER) as parquet:
            column = _column(parquet.schema_arrow, part.file.field)
            for number in _row_groups_of(part, parquet.metadata):
                about = parquet.metadata.row_group(number)
                size = about.column(_leaf(parquet, column)).total_uncompressed_size
                rows = max(1, min(_ROWS, _BATCH_BYTES * about.num_rows // max(1, size)))
                batches = parquet.iter_batches(
                    batch_size=rows, row_groups=[number], columns=[part.file.field], use_threads=False
                )
                for batch in batches:
                    yield from _values(batch.column(0))
    except (pa.ArrowException, OSError):  # Arrow tells of damaged pages by OSError
        raise UnreadableFileError("broken parquet") from None


def arrow_values(part: Part, opened: OpenedFile) -> Iterator[Value]:
    """The values of the text's column in the part's record batches; a stream has one part, its first.

    Raises UnreadableFileError, perhaps after some values, when the file is damaged or has no such column.
    """
    try:
        for batch in _record_batches(part, opened):
            column = batch.column(0)
            for start in range(0, len(column), _ROWS):
                yield from _values(column.slice(start, _ROWS))
    except (pa.ArrowException, OSError):
        raise UnreadableFileError("broken arrow") from None


def _record_batches(part: Part, opened: OpenedFile) -> Iterator[pa.RecordBatch]:
    source = pa.PythonFile(opened.stream(), "r")
    if opened.read_at(len(_ARROW_FILE), 0) != _ARROW_FILE:
        if part.start == 0:
            column = _column(pa.ipc.open_stream(source).schema, part.file.field)
            source.seek(0)
            yield from pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(included_fields=[column]))
        return
    column = _column(pa.ipc.open_file(source).schema, part.file.field)
    reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[column], use_threads=False))
    # Where a batch begins is not told; by its number it is about as far into the file as by its bytes.
    for number in range(reader.num_record_batches):
        if part.start <= part.file.size * number // reader.num_record_batches < part.stop:
            yield reader.get_batch(number)


def _row_groups_of(part: Part, metadata: pq.FileMetaData) -> list[int]:
    found = []
    last = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:
            continue
        columns = [group.column(index) for index in range(metadata.num_columns)]
        offsets = [column.data_page_offset for column in columns]
        begins = min(offsets + [c.dictionary_page_offset for c in columns if c.dictionary_page_offset])
        if not last < begins < part.file.size:
            raise UnreadableFileError("broken parquet")  # it would be in no part, or in two
        last = begins
        if part.start <= begins < part.stop:
            found.append(number)
    return found


def _column(schema: pa.Schema, field: str) -> int:
    index = schema.get_field_index(field)
    if index < 0:
        raise UnreadableFileError(f"no field {field!r}")
    kind = schema.field(index).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    if not is_text and not is_bytes:
        raise UnreadableFileError(f"field {field!r} is not text")
    return index


def _leaf(parquet: pq.ParquetFile, column: int) -> int:
    """The text's column among the leaves of nested ones."""
    name = parquet.schema_arrow.field(column).name
    return next(i for i in range(parquet.metadata.num_columns) if parquet.schema.column(i).path == name)


def _values(column: pa.Array) -> Iterator[Value]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_raw(value) for value in column]
    for value in values:
        if isinstance(value, bytes):
            try:
                yield value.decode()
            except UnicodeDecodeError:
                yield value
        else:
            yield value


def _raw(value: pa.Scalar) -> Value:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return bytes(value.as_buffer())
