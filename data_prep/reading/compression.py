"""The bytes of a compressed file, in pieces.

Arrow unpacks gzip, zstd and bzip2 (files of several members or frames too, as crawls write them) and tells a truncated
file from a whole one, which the zstandard package's reader does not; it knows no xz, which is the standard library's.
"""

import io
import lzma
from collections.abc import Iterator

from data_prep.reading.failures import UnreadableFileError
from data_prep.reading.opening import OpenedFile

PIECE = 2**20
_NAMES = {"gz": "gzip", "zst": "zstd", "bz2": "bzip2", "xz": "xz"}
_ARROWS_NAMES = {"gz": "gzip", "zst": "zstd"}
_XZ_MEMORY = 256 * 2**20
"""For its dictionary; xz -9 takes 64 MiB, and a file can ask for 4 GiB."""


def pieces(opened: OpenedFile, packing: str, start: int) -> Iterator[bytes]:
    """The bytes from `start` on, unpacked (then all), at most PIECE or a block of the file at once.

    Raises UnreadableFileError, perhaps after some pieces, when the file is truncated or damaged.
    """
    if packing == "xz":
        yield from _xz(opened.stream())
    elif packing:
        yield from _arrow(opened.stream(), packing)
    else:
        yield from opened.blocks(start)


def _arrow(stream: io.BufferedReader, packing: str) -> Iterator[bytes]:
    import pyarrow as pa

    unpacked = pa.CompressedInputStream(pa.PythonFile(stream, "r"), _ARROWS_NAMES.get(packing, packing))
    while True:
        try:
            piece = unpacked.read(PIECE)
        except (OSError, pa.ArrowException) as error:
            raise _broken(packing, error) from None
        if not piece:
            return
        yield piece


def _xz(stream: io.BufferedReader) -> Iterator[bytes]:
    """One stream after the other, with zero bytes between them (xz file format, 2.2)."""
    packed = stream.read(PIECE)
    while packed:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        while not unpacker.eof:
            fed = b""
            if unpacker.needs_input:
                fed, packed = packed or stream.read(PIECE), b""
                if not fed:
                    raise _broken("xz")
            try:
                piece = unpacker.decompress(fed, PIECE)
            except lzma.LZMAError as error:
                raise _broken("xz", error) from None
            if piece:
                yield piece
        packed = unpacker.unused_data
        while not (packed := packed.lstrip(b"\0")) and (packed := stream.read(PIECE)):
            pass


def _broken(packing: str, error: Exception | None = None) -> UnreadableFileError:
    # What Zstandard says of windows over 128 MiB, which Arrow does not take, and liblzma of _XZ_MEMORY.
    if any(words in str(error) for words in ("requires too much memory", "Memory usage limit")):
        return UnreadableFileError(f"{_NAMES[packing]} that takes too much memory to unpack")
    return UnreadableFileError(f"broken {_NAMES[packing]}")
