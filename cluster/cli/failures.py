"""What a user is told of an error that ends a command, and its exit code."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common.exit_codes import FAILED, USER_ERROR
from common.files import DISK_FULL
from common.redaction import shown
from data_prep.reading.failures import ReadFailed

_ADVICE = {errno.EACCES: "get access from its owner", **dict.fromkeys(DISK_FULL, "free disk space")}


@contextmanager
def told_in_a_sentence() -> Iterator[None]:
    """Exit with a sentence where the user, the disk or a store that is away is the cause; other errors pass."""
    try:
        yield
    except ValueError as error:
        _exit(error, USER_ERROR)
    except ReadFailed as error:
        _exit(error, FAILED, "; rerun the same command to resume")
    except ConnectionError as error:
        _exit(error, FAILED)
    except OSError as error:
        if error.errno is None and str(error).startswith("s3://"):  # the library has tried for minutes
            _exit(error, FAILED, "; rerun the same command to resume")
        if error.errno not in _ADVICE:
            raise
        _exit(error, FAILED, f"; {_ADVICE[error.errno]} and rerun the same command")


def _exit(error: Exception, code: int, advice: str = "") -> None:
    print(f"multihop: {shown(str(error))}{advice}", file=sys.stderr)
    sys.exit(code)
