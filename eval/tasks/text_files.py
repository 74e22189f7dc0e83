"""Reads the text files of tasks: plain text, TSV without quoting, quoted CSV, JSON lines; errors name file and line."""

import csv
import gzip
import json
import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import open_regular

Rows = Iterator[tuple[int, list[str]]]
"""The number of a row's first line, from 1, and its fields."""

_SHOWN = 200
# The default limit, 131,072 characters, is less than a long article; the size of the file is the limit here.
csv.field_size_limit(2**31 - 1)


def official_folder(data_dir: str | None) -> Path:
    """Return the directory with official files: `data_dir`, or share/multihop in the Python environment
    (eval.data_dir)."""
    return Path(data_dir) if data_dir else Path(sys.prefix) / "share" / "multihop"


def read_text(path: Path) -> str:
    """Return the text of a file, line ends as they are, without a byte-order mark.

    Raises:
        UserError: it is missing, not a regular file, not UTF-8, or has nothing but whitespace.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: expected UTF-8; get the official file again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); copy the official file to it") from None
    if not text.strip():
        raise UserError(f"{path} is empty; get the official file again")
    return text


def read_objects(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number, from 1, and the JSON object of each line that is not blank.

    Raises:
        UserError: as `read_text`, or a line is not a JSON object with a non-empty string under each of `fields`.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) and row[name] for name in fields):
            raise UserError(
                f"{path}, line {number}: expected a JSON object with the texts {', '.join(fields)}, got {line[:80]!r}"
            )
        yield number, row


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield each line's number, from 1, and its text. Only \n and \r\n end a line; a byte-order mark is dropped.

    Raises:
        UserError: the file is missing, empty, not a regular file, a damaged .gz file, or not UTF-8.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a text file") from None
    number = 0
    with file, gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file as lines:
        for number, raw in enumerate(_whole(path, lines), start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: byte {error.start} of the line is not UTF-8; save the file as UTF-8"
                ) from None
            yield number, line.removesuffix("\n").removesuffix("\r")
    if number == 0:
        raise UserError(f"{path} is empty; get the file again")


def _whole(path: Path, lines: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from lines
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is not a whole .gz file ({error}); get the file again") from None


def tsv_rows(path: Path) -> Rows:
    """Return the rows of a TSV file without quoting: every tab separates, and quotation marks are text; blank lines are
    skipped. Raises UserError as `text_lines`."""
    return ((number, line.split("\t")) for number, line in text_lines(path) if line)


def csv_rows(path: Path) -> Rows:
    """Yield the rows of a CSV file (RFC 4180): quoted fields may hold commas, quotation marks and line ends.

    Raises:
        UserError: as `text_lines`, and for a quoted field that does not end or goes on after its end.
    """
    reader = csv.reader((f"{line}\n" for _, line in text_lines(path)), strict=True)
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{path}, line {start}: the row is not CSV ({error}); quote its fields") from None
        if row:
            yield start, row


def json_rows(path: Path, names: Sequence[str]) -> Rows:
    """Yield some fields of each line of a JSON-lines file, in the order of `names`, as text: numbers and truth values
    as JSON writes them. Blank lines are skipped.

    Raises:
        UserError: as `text_lines`, and for a line that is not an object with a text or number in each of the fields.
    """
    for number, line in text_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # refuses half a surrogate pair, which is no text
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); write an object on each line") from None
        values = [row.get(name) if isinstance(row, dict) else None for name in names]
        if any(value is None or isinstance(value, dict | list) for value in values):
            raise UserError(
                f"{path}, line {number}: expected an object with a text or number in {', '.join(names)}, got "
                f"{line[:80]!r}"
            )
        yield number, [value if isinstance(value, str) else json.dumps(value) for value in values]


def columns_of(path: Path, rows: Rows, names: Sequence[str], too_few: list[int] | None = None) -> Rows:
    """Yield some columns of each row after the header, in the order of `names`.

    Args:
        too_few: gets the line numbers of rows with fewer columns than the header, which are skipped; None: such a row
            is an error.

    Raises:
        UserError: the header has no column of such a name, or a row's number of columns is not the header's.
    """
    first, header = next(rows, (1, []))
    if not set(names) <= set(header):
        raise UserError(
            f"{path}, line {first}: expected a header with the columns {', '.join(names)}, found "
            f"{', '.join(header)[:_SHOWN]!r}; check that it is this task's file"
        )
    at = [header.index(name) for name in names]
    for number, row in rows:
        if len(row) == len(header):
            yield number, [row[index] for index in at]
        elif too_few is not None and len(row) < len(header):
            too_few.append(number)
        else:
            raise UserError(f"{path}, line {number}: expected {len(header)} columns as in the header, got {len(row)}")


def class_index(path: Path, line: int, label: str, known: Sequence[str]) -> int:
    """Return the position of a label among `known`. Raises UserError with the file and line of an unknown one."""
    if label not in known:
        raise UserError(
            f"{path}, line {line}: expected one of the labels {', '.join(known)[:_SHOWN]}, got {label[:_SHOWN]!r}"
        )
    return known.index(label)


def finite_number(path: Path, line: int, text: str, lowest: float = -math.inf, highest: float = math.inf) -> float:
    """Return a field's number. Raises UserError with the file and line of what is not a finite number in the range."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and lowest <= number <= highest):
        bounds = f" from {lowest:g} to {highest:g}" if math.isfinite(highest - lowest) else ""
        raise UserError(f"{path}, line {line}: expected a number{bounds}, got {text[:_SHOWN]!r}")
    return number
