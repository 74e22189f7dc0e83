"""Reads the text columns of a range of a Parquet or Arrow file, a batch of rows at a time.

A row group or record batch belongs to the range in which it begins. Parquet is read page by page; the text columns of
an Arrow record batch are held whole.
"""

import contextlib
import os
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader
from multihop.data_prep.reading.sources import FileRange, InputFile

_ROWS = 1024
_BATCH_BYTES = 2**20
"""Bytes of the file per batch of rows, compressed and with the other columns."""
_BUFFER = 2**20
_ARROW_FILE = b"ARROW1"
_BINARY = (
    (pa.string(), pa.binary()),
    (pa.large_string(), pa.large_binary()),
    (pa.string_view(), pa.binary_view()),
)

Value = str | bytes | None
"""A text; bytes if it is not UTF-8, None if it is null."""


def parquet_values(file_range: FileRange, reader: FileReader, fields: list[str]) -> Iterator[tuple[Value, ...]]:
    """Yield the values of the text columns `fields`, row by row, in the range's row groups.

    Raises:
        UnreadableFileError: the file is damaged or has no such column; possibly after some values.
    """
    try:
        # Without a buffer or with pre_buffer, the column of a whole row group is fetched before its first row.
        source = pa.PythonFile(reader.stream(), "r")
        with pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER) as parquet:
            _column_indices(parquet.schema_arrow, fields)
            groups = _indices_in_range(file_range, parquet.num_row_groups)
            rows = max(1, min(_ROWS, _BATCH_BYTES * parquet.metadata.num_rows // file_range.file.size))
            for batch in parquet.iter_batches(rows, groups, fields, use_threads=False) if groups else []:
                yield from zip(*(_values(batch.column(field)) for field in fields), strict=True)
    except (pa.ArrowException, OSError):  # Arrow raises OSError for damaged pages
        raise UnreadableFileError("broken parquet") from None


def arrow_values(file_range: FileRange, reader: FileReader, fields: list[str]) -> Iterator[tuple[Value, ...]]:
    """Yield as `parquet_values`, from the range's record batches; all of a stream belongs to the first range.

    Raises:
        UnreadableFileError: the file is damaged or has no such column; possibly after some values.
    """
    try:
        for batch in _record_batches(file_range, reader, fields):
            columns = [batch.column(field) for field in fields]
            for column in columns:
                # Using a damaged offset would crash the process. UTF-8 is checked for each value.
                (column if pa.types.is_dictionary(column.type) else _as_bytes(column)).validate(full=True)
            for start in range(0, batch.num_rows, _ROWS):
                yield from zip(*(_values(column.slice(start, _ROWS)) for column in columns), strict=True)
    except (pa.ArrowException, OSError, MemoryError):  # a damaged length requests huge memory
        raise UnreadableFileError("broken arrow") from None


def text_columns(file: InputFile, reader: FileReader) -> list[str]:
    """Return the names of the columns whose values `parquet_values` or `arrow_values` can read.

    Raises:
        UnreadableFileError: the file is damaged.
    """
    try:
        with _await_io_thread():
            source = pa.PythonFile(reader.stream(), "r")
            if file.format == "parquet":
                schema = pq.read_schema(source)
            elif reader.read_at(len(_ARROW_FILE), 0) == _ARROW_FILE:
                schema = pa.ipc.open_file(source).schema
            else:
                schema = pa.ipc.open_stream(source).schema
    except (pa.ArrowException, OSError):
        raise UnreadableFileError(f"broken {file.format}") from None
    return [field.name for field in schema if _is_text(field.type) and schema.names.count(field.name) == 1]


def _record_batches(file_range: FileRange, reader: FileReader, fields: list[str]) -> Iterator[pa.RecordBatch]:
    source = pa.PythonFile(reader.stream(), "r")
    if reader.read_at(len(_ARROW_FILE), 0) != _ARROW_FILE:
        if file_range.start == 0:
            columns = _column_indices(pa.ipc.open_stream(source).schema, fields)
            source.seek(0)
            yield from pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(included_fields=columns))
        return
    with _await_io_thread():
        columns = _column_indices(pa.ipc.open_file(source).schema, fields)
        batches = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False))
    for index in _indices_in_range(file_range, batches.num_record_batches):
        yield batches.get_batch(index)


@contextlib.contextmanager
def _await_io_thread() -> Iterator[None]:
    """Open files in this context: on exit, wait until Arrow's I/O thread has released the footers that it read.

    The thread does so a moment after `open_file` returned and needs the GIL: a process that exits in this moment is
    aborted (https://docs.python.org/3.11/c-api/init.html#c.PyGILState_Ensure). A single thread works in order, so once
    it has failed to read a file without Python objects, it has released the others.
    """
    threads = pa.io_thread_count()
    pa.set_io_thread_count(1)
    try:
        yield
    finally:
        with pa.OSFile(os.devnull) as nothing, contextlib.suppress(OSError):
            pa.ipc.open_file(nothing, footer_offset=64)
        pa.set_io_thread_count(threads)


def _indices_in_range(file_range: FileRange, count: int) -> list[int]:
    """Return the row groups or record batches of the range, assuming that they are of equal size.

    pyarrow does not report where record batches begin, and its functions for row groups crash the process on a damaged
    footer (version 25).
    """
    size = file_range.file.size
    return [number for number in range(count) if file_range.start <= size * number // count < file_range.stop]


def _column_indices(schema: pa.Schema, fields: list[str]) -> list[int]:
    return [_column_index(schema, field) for field in fields]


def _column_index(schema: pa.Schema, field: str) -> int:
    index = schema.get_field_index(field)
    if index < 0:
        raise UnreadableFileError(f"no field {field!r}")
    if not _is_text(schema.field(index).type):
        raise UnreadableFileError(f"field {field!r} is not text")
    return index


def _is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are text, or bytes that may be."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return is_text or is_bytes


def _values(column: pa.Array) -> Iterator[Value]:
    for value in _as_bytes(column).to_pylist():
        try:
            yield None if value is None else value.decode()
        except UnicodeDecodeError:
            yield value


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return a binary view of the column."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for text, binary in _BINARY:
        if column.type == text:
            return column.view(binary)
    return column
