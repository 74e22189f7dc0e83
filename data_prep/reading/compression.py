"""Decompresses a file in chunks.

Arrow decompresses gzip and zstd, also files of several members or frames, as crawls write them, and detects a truncated
file, which the zstandard package's reader does not. The standard library decompresses xz, and bzip2
because Arrow (version 25) refuses an empty stream in a file of several.
"""

import bz2
import io
import lzma
from collections.abc import Callable, Iterator
from functools import partial

from multihop.data_prep.reading.errors import UnreadableFileError
from multihop.data_prep.reading.file_reader import FileReader

CHUNK = 2**20
_NAMES = {"gz": "gzip", "zst": "zstd", "bz2": "bzip2", "xz": "xz"}
_XZ_MEMORY = 256 * 2**20
"""Limit for the dictionary in bytes; xz -9 takes 64 MiB, and a file can demand 4 GiB."""
_DECOMPRESSORS: dict[str, Callable[[], lzma.LZMADecompressor | bz2.BZ2Decompressor]] = {
    "xz": partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, memlimit=_XZ_MEMORY),
    "bz2": bz2.BZ2Decompressor,
}


def chunks(reader: FileReader, compression: str, start: int) -> Iterator[bytes]:
    """Yield the bytes from `start` on, or all bytes of a compressed file, in chunks of at most CHUNK bytes or a block.

    Raises:
        UnreadableFileError: the file is truncated or damaged; possibly after some chunks.
    """
    if compression in _DECOMPRESSORS:
        yield from _streams(reader.stream(), compression)
    elif compression:
        yield from _arrow(reader.stream(), compression)
    else:
        yield from reader.blocks(start)


def _arrow(stream: io.BufferedReader, compression: str) -> Iterator[bytes]:
    import pyarrow as pa

    decompressed = pa.CompressedInputStream(pa.PythonFile(stream, "r"), _NAMES[compression])
    while True:
        try:
            chunk = decompressed.read(CHUNK)
        except (OSError, pa.ArrowException) as error:
            raise _broken(compression, error) from None
        if not chunk:
            return
        yield chunk


def _streams(stream: io.BufferedReader, compression: str) -> Iterator[bytes]:
    """Decompress concatenated streams; xz allows zero padding between them (xz file format, 2.2)."""
    padding = b"\0" if compression == "xz" else b""
    packed = stream.read(CHUNK)
    while packed:
        decompressor = _DECOMPRESSORS[compression]()
        while not decompressor.eof:
            fed = b""
            if decompressor.needs_input:
                fed, packed = packed or stream.read(CHUNK), b""
                if not fed:
                    raise _broken(compression)
            try:
                chunk = decompressor.decompress(fed, CHUNK)
            except (OSError, lzma.LZMAError) as error:
                raise _broken(compression, error) from None
            if chunk:
                yield chunk
        packed = decompressor.unused_data
        while not (packed := packed.lstrip(padding)) and (packed := stream.read(CHUNK)):
            pass


def _broken(compression: str, error: Exception | None = None) -> UnreadableFileError:
    # The messages of Zstandard for windows over 128 MiB, which Arrow refuses, and of liblzma over _XZ_MEMORY.
    if any(words in str(error) for words in ("requires too much memory", "Memory usage limit")):
        return UnreadableFileError(f"{_NAMES[compression]} that takes too much memory to unpack")
    return UnreadableFileError(f"broken {_NAMES[compression]}")
