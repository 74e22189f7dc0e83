"""Reads a small text file that a user named: a recipe, a DeepSpeed configuration."""

import errno
from pathlib import Path

from multihop.common.errors import UserError
from multihop.common.files import open_regular

MOST_BYTES = 2**20


def read_given_text(path: Path, name: str, what: str) -> str:
    """The text of a file.

    Args:
        name: the beginning of messages: the path, or the recipe's key with the path.
        what: the expected content, for instance "a recipe".

    Raises:
        UserError: the file does not exist, is not a regular file, is longer than MOST_BYTES, cannot be read, or is not
            UTF-8.
    """
    try:
        with open_regular(path) as file:  # opening a pipe would block
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{name} does not exist; give the path of {what}") from None
    except IsADirectoryError:
        raise UserError(f"{name} is a directory; give the path of {what}") from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UserError(f"{name} is a pipe or a device; write {what} into a file and give its path") from None
        raise UserError(f"{name} cannot be read ({error.strerror}); give the path of {what}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{name} is longer than {MOST_BYTES:,} bytes; give the path of {what}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
