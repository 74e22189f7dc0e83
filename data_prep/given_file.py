"""A small text file that a user named: a recipe, a DeepSpeed configuration."""

import errno
from pathlib import Path

from data_prep.files import open_regular

MOST_BYTES = 2**20


def read_given_text(path: Path, name: str, what: str) -> str:
    """The text of a file.

    Args:
        name: what a message begins with: the path, or the key that named it with the path.
        what: what should stand there, for instance "a recipe".

    Raises:
        ValueError: it is not there, no file, longer than MOST_BYTES, may not be read, or is not UTF-8.
    """
    try:
        with open_regular(path) as file:  # to open a pipe would be to wait for whoever writes into it
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(f"{name}: there is no such file; give the path of {what}") from None
    except IsADirectoryError:
        raise ValueError(f"{name} is a folder; give the path of {what}") from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError(f"{name} is a pipe or a device; write {what} into a file and give its path") from None
        raise ValueError(f"{name} cannot be read ({error.strerror}); give the path of {what}") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"{name} is longer than {MOST_BYTES:,} bytes; give the path of {what}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
