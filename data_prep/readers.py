"""Documents of one part of a file; what cannot be read comes out with its reason instead of stopping the rest."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from data_prep.sources import InputFile, Part

MAX_DOCUMENT_BYTES = 64 * 2**20
MAX_JSON_BYTES = 2**30
"""A .json file is parsed whole, so its size is bounded; .jsonl has no bound."""

TOO_LONG = "longer than 64 MiB"


@dataclass(frozen=True)
class Bad:
    """A document that cannot be read."""

    place: int
    """Its line (.jsonl), item (.json) or row (.parquet), from 1; for .jsonl counted from the part's start."""
    reason: str


class UnreadableFileError(Exception):
    """A file of which nothing is used; the message is the reason. Raised before its first document."""


def read_part(part: Part) -> Iterator[str | Bad]:
    """The documents of a part, in order, as they stand there.

    Raises UnreadableFileError, before anything is yielded, when the file as a whole cannot be used.
    """
    file = part.file
    try:
        open(file.path, "rb").close()
    except OSError as error:
        raise UnreadableFileError(f"cannot be opened ({error.strerror})") from None
    if file.gz:
        _check_gzip(file.path)
    if file.format == "txt":
        yield _read_txt(file)
    elif file.format == "json":
        yield from _read_json(file)
    elif file.format == "parquet":
        yield from _read_parquet(file)
    else:
        yield from _read_jsonl(part)


def _open(file: InputFile) -> BinaryIO:
    return gzip.open(file.path, "rb") if file.gz else open(file.path, "rb")  # type: ignore[return-value]


def _check_gzip(path: str) -> None:
    """Unpack to the end once: documents before a break must not be used as if the file were whole."""
    try:
        with gzip.open(path, "rb") as file:
            while file.read(2**20):
                pass
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise UnreadableFileError("broken gzip") from None


def _decode(data: bytes) -> str:
    return data.decode("utf-8-sig")


def _read_txt(file: InputFile) -> str:
    with _open(file) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UnreadableFileError(TOO_LONG)
    try:
        return _decode(data)
    except UnicodeDecodeError:
        raise UnreadableFileError("not UTF-8") from None


def _read_json(file: InputFile) -> Iterator[str | Bad]:
    with _open(file) as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise UnreadableFileError("longer than 1 GiB; .jsonl has no limit")
    try:
        parsed = json.loads(_decode(data))
    except UnicodeDecodeError:
        raise UnreadableFileError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise UnreadableFileError("broken JSON") from None
    if isinstance(parsed, dict):
        parsed = list(parsed.values())
    if not isinstance(parsed, list):
        raise UnreadableFileError("neither a list of objects nor an object of objects")
    for place, row in enumerate(parsed, start=1):
        yield _field(row, file.field, place)


def _read_jsonl(part: Part) -> Iterator[str | Bad]:
    with _open(part.file) as stream:
        if part.start:
            # A line belongs to the part that its first byte lies in.
            stream.seek(part.start - 1)
            _skip_line(stream)
        place = 0
        while part.file.gz or stream.tell() < part.stop:
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            if not line:
                break
            place += 1
            if len(line) > MAX_DOCUMENT_BYTES:
                if not line.endswith(b"\n"):
                    _skip_line(stream)
                yield Bad(place, TOO_LONG)
                continue
            if line.isspace():
                yield Bad(place, "empty")
                continue
            try:
                row = json.loads(_decode(line))
            except UnicodeDecodeError:
                yield Bad(place, "not UTF-8")
            except (ValueError, RecursionError):
                yield Bad(place, "broken JSON")
            else:
                yield _field(row, part.file.field, place)


def _skip_line(stream: BinaryIO) -> None:
    while (rest := stream.readline(2**20)) and not rest.endswith(b"\n"):
        pass


def _field(row: Any, field: str, place: int) -> str | Bad:
    if not isinstance(row, dict) or field not in row:
        return Bad(place, f"no field {field!r}")
    value = row[field]
    if not isinstance(value, str):
        return Bad(place, f"field {field!r} is not text")
    return value


def _read_parquet(file: InputFile) -> Iterator[str | Bad]:
    for _ in _parquet_columns(file):
        pass  # a broken page anywhere must be known before the first document is used
    place = 0
    for column in _parquet_columns(file):
        for value in column:
            place += 1
            yield value if isinstance(value, str) else Bad(place, f"field {file.field!r} is not text")


def _parquet_columns(file: InputFile) -> Iterator[list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as parquet:
            if file.field not in parquet.schema_arrow.names:
                raise UnreadableFileError(f"no field {file.field!r}")
            kind = parquet.schema_arrow.field(file.field).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise UnreadableFileError(f"field {file.field!r} is not text")
            for batch in parquet.iter_batches(batch_size=1024, columns=[file.field]):
                yield batch.column(0).to_pylist()
    except UnicodeDecodeError:
        raise UnreadableFileError("not UTF-8") from None
    except (pa.ArrowException, OSError):  # Arrow tells of damaged pages by OSError
        raise UnreadableFileError("broken parquet") from None
