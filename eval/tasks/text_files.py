"""Readers of the text files of zero-shot tasks; errors name the file and the line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import open_regular


def read_text(path: Path) -> str:
    """The text of a file, line ends as they are, without a byte-order mark.

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
    """The line number, from 1, and the JSON object of each line that is not blank.

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
