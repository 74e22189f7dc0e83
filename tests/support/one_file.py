"""Read a file as one part, or return the error message if it is unreadable."""

import json
import random
from pathlib import Path

import pytest

from multihop.data_prep.config import Source
from multihop.data_prep.reading import identities
from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.readers import read_range
from multihop.data_prep.reading.sources import FileRange, list_files


def rows(count: int) -> bytes:
    """Return JSON lines that do not compress well, so that a file of them is decompressed in several chunks."""
    rng = random.Random(0)
    return b"".join(json.dumps({"text": str(rng.getrandbits(4000))}).encode() + b"\n" for _ in range(count))


def one_part(path: Path) -> FileRange:
    files = list_files([Source(path=str(path))])
    (file,) = identities.with_identities(files, identities.hash_files(files))
    return FileRange(file, 0, file.size)


def fails(part: FileRange) -> str:
    with pytest.raises(UnreadableFileError) as failed:
        list(read_range(part))
    return str(failed.value)
