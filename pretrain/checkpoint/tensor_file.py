"""A rank's file of a checkpoint: named one-dimensional float32 tensors in the safetensors format.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 little-endian bytes, the header
in JSON, then the tensors' bytes without gaps. It is read here instead of by the library, so that exactly the bytes of
a slice are read, from a disk or a bucket.
"""

import json
import reprlib
import struct
from dataclasses import dataclass
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import json_object
from multihop.common.storage import RandomAccessFile

ITEM_BYTES = 4
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 8 * 2**20
"""Enough for a model with a thousand layers on one rank."""
_MIN_BYTES_PER_LIST = 16
"""Minimum number of a header's bytes per list or object: a tensor has three in sixty bytes. Many empty ones would take
many times their size in memory."""


@dataclass(frozen=True)
class Extent:
    """The bytes of a tensor in its file."""

    offset: int
    """Position of the tensor's first byte in the file."""
    numel: int


def header_of(lengths: dict[str, int]) -> bytes:
    """The header of a file with float32 tensors of these names and numbers of elements, in this order."""
    header, offset = {}, 0
    for name, numel in lengths.items():
        stop = offset + numel * ITEM_BYTES
        header[name] = {"dtype": "F32", "shape": [numel], "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    assert len(text) <= _MAX_HEADER_BYTES, "read_header would refuse it"
    return _LENGTH.pack(len(text)) + text


def read_header(file: RandomAccessFile) -> tuple[dict[str, Extent], int]:
    """The tensors of a file, and the number of bytes that were read to find them.

    Raises:
        UserError: It is not such a file: the lengths are inconsistent, a tensor is not one-dimensional float32, or
            tensors overlap or leave gaps.
    """
    first = file.read_at(0, _LENGTH.size)
    if len(first) < _LENGTH.size:
        raise UserError(f"it ends after {len(first)} bytes")
    (length,) = _LENGTH.unpack(first)
    begin = _LENGTH.size + length
    if begin > file.size:
        raise UserError(f"its header is said to have {length} bytes, the whole file has {file.size}")
    data = file.read_at(_LENGTH.size, min(length, _MAX_HEADER_BYTES + 1))
    if data.count(b"[") + data.count(b"{") > len(data) // _MIN_BYTES_PER_LIST + 1:
        raise UserError("its header holds more lists than a table of tensors has")
    header = json_object(data, "its header", max_bytes=_MAX_HEADER_BYTES)
    header.pop("__metadata__", None)
    extents = {name: _extent(name, entry, begin) for name, entry in header.items()}
    stop = begin
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].offset, item[1].numel)):
        if extent.offset != stop:
            raise UserError(f"tensor {name} begins at byte {extent.offset}, the one before ends at {stop}")
        stop += extent.numel * ITEM_BYTES
    if stop != file.size:
        raise UserError(f"its tensors end at byte {stop}, the file at {file.size}")
    return extents, begin


def _extent(name: str, entry: Any, begin: int) -> Extent:
    match entry:
        case {"dtype": "F32", "shape": [int(numel)], "data_offsets": [int(start), int(stop)]}:
            counts = all(type(each) is int and each >= 0 for each in (numel, start, stop))  # True is an int to `match`
            if counts and stop - start == numel * ITEM_BYTES:
                return Extent(begin + start, numel)
    raise UserError(
        f"tensor {name[:200]} is not float32 of one dimension between two offsets that fit: {reprlib.repr(entry)}"
    )
