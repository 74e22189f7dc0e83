"""Where the slices of a checkpoint of format version 2 or 3 are: only the headers of all its files together say it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from multihop.common.errors import UserError
from multihop.common.storage import RandomAccessFile
from multihop.pretrain.checkpoint.layout import Locate, Piece, parse_tensor_name
from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.tensor_file import ITEM_BYTES, Extent, read_header

Open = Callable[[int], AbstractContextManager[RandomAccessFile]]
"""The file with this index in the manifest."""


def read_headers(location: str, manifest: CheckpointManifest, opened: Open) -> tuple[Locate, int]:
    """How to find the bytes of any slice, and how many bytes were read for it: the headers of all files.

    Raises:
        UserError: a file is missing or damaged, or the slices are not each element of each parameter once.
    """
    parts: dict[tuple[str, str], list[tuple[int, Extent, int]]] = {}
    bytes_read = 0
    for index, entry in enumerate(manifest.files):
        with opened(index) as file:
            try:
                extents, header_bytes = read_header(file)
                for tensor, extent in extents.items():
                    kind, name, start = parse_tensor_name(tensor)
                    parts.setdefault((kind, name), []).append((start, extent, index))
            except ValueError as error:
                raise UserError(f"{location}/{entry.file} cannot be read: {error}") from None
        bytes_read += header_bytes
    _check(location, manifest, parts)

    def locate(kind: str, name: str, start: int, elements: int) -> list[Piece]:
        found, stop = [], start + elements
        for first, extent, index in parts.get((kind, name), []):
            begin, end = max(start, first), min(stop, first + extent.numel)
            if begin < end:
                found.append(Piece(index, extent.offset + (begin - first) * ITEM_BYTES, end - begin))
        return found

    return locate, bytes_read


def _check(
    location: str, manifest: CheckpointManifest, parts: dict[tuple[str, str], list[tuple[int, Extent, int]]]
) -> None:
    numels = {name: math.prod(shape) for name, shape in manifest.parameters.items()}
    for (kind, name), slices in parts.items():
        slices.sort(key=lambda part: (part[0], part[1].numel))
        stop = 0
        for start, extent, _ in slices:
            if start != stop:
                raise UserError(f"{location} has {kind}/{name} up to element {stop}, and then from {start}")
            stop += extent.numel
        if stop != numels.get(name):
            raise UserError(f"{location} holds {stop} elements of {kind}/{name}, the manifest says {numels.get(name)}")
    for name in numels:
        if ("weight", name) not in parts:
            raise UserError(f"{location} holds nothing of weight/{name}, which the manifest names")
