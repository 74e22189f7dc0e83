"""Reads any slice of a committed checkpoint."""

import errno
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from multihop.common.errors import UserError
from multihop.common.storage import RandomAccessFile, open_folder
from multihop.pretrain.checkpoint.layout import Locate, Piece, parse_tensor_name
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, layout_of, read_checkpoint_manifest
from multihop.pretrain.checkpoint.tensor_file import ITEM_BYTES, Extent, read_header

_THREADS = 8
_MAX_OPEN_FILES = 256
"""Maximum number of open files: a process may have 1,024 by default, and a checkpoint has a file per rank."""
UNREADABLE = (errno.EIO, errno.EINVAL, errno.EISDIR)
"""Errors of files that the disk cannot read, or that are not regular files; not those of an unreachable network."""
_OpenFileAt = Callable[[int], AbstractContextManager[RandomAccessFile]]
"""Opens the file with this index in the manifest."""


@dataclass
class _OpenFile:
    lock: Lock = field(default_factory=Lock)
    """Held while the file is opened, so that other threads can open other files."""
    source: RandomAccessFile | None = None
    users: int = 0

    def close(self) -> None:
        if self.source is not None:
            self.source.close()


class CheckpointReader:
    """Reads any slice of a committed checkpoint, from any thread, and opens only the files that hold it.

    A context manager, which closes the files. The files of format versions 2 and 3 are all opened on entry, because
    the manifest does not say what they hold.
    """

    def __init__(self, location: str, manifest: CheckpointManifest | None = None) -> None:
        """Read the manifest; no other file is opened.

        Args:
            manifest: The manifest at `location`, if it has been read already.
        """
        self.manifest = manifest or read_checkpoint_manifest(location)
        self.bytes_read = 0
        """Bytes read from the ranks' files so far."""
        self.files_opened = 0
        """Number of the ranks' files opened so far."""
        self._location, self._folder = location, open_folder(location)
        self._lock = Lock()
        self._open: dict[int, _OpenFile] = {}
        """Open files by their index in the manifest; the most recently used is last."""
        self._locate: Locate

    def __enter__(self) -> "CheckpointReader":
        """Find the slices.

        Raises:
            UserError: A file of a checkpoint of format version 2 or 3 is missing or damaged.
        """
        layout = layout_of(self.manifest)
        if layout is not None:
            self._locate = layout.locate
            return self
        try:
            self._locate, self.bytes_read = _read_headers(self._location, self.manifest, self._file)
        except BaseException:
            self._close_all()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close_all()

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Elements `start` to `start + numel - 1` of a parameter or moment, float32 (numel,); only those are read.

        Raises:
            UserError: The checkpoint does not hold all of them, or a file is missing or damaged.
        """
        pieces = self._locate(kind, name, start, numel)
        if (held := sum(piece.elements for piece in pieces)) != numel:
            raise UserError(f"{self._location} holds {held} of {numel} elements of {kind}/{name} from {start} on")
        out, filled = np.empty(numel, np.dtype("<f4")), 0
        for index, offset, elements in pieces:
            with self._file(index) as file:
                data = file.read_at(offset, elements * ITEM_BYTES)
            if len(data) != elements * ITEM_BYTES:
                raise UserError(f"{self._path(index)} became shorter while it was read")
            out[filled : filled + elements] = np.frombuffer(data, np.dtype("<f4"))
            filled += elements
        with self._lock:
            self.bytes_read += numel * ITEM_BYTES
        return torch.from_numpy(out)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and whole tensor."""

        def whole(parameter: tuple[str, list[int]]) -> tuple[str, Tensor]:
            name, shape = parameter
            return name, self.read("weight", name, 0, math.prod(shape)).view(shape)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as threads:  # hides the latency of a bucket
            yield from threads.map(whole, self.manifest.parameters.items())

    @contextmanager
    def _file(self, index: int) -> Iterator[RandomAccessFile]:
        """A file of the checkpoint, opened if needed, which stays open while it is among the most recently used."""
        with self._lock:
            file = self._open.pop(index, None) or _OpenFile()
            self._open[index] = file
            file.users += 1
        try:
            with file.lock:
                file.source = file.source or self._open_file(index)
            yield file.source
        finally:
            with self._lock:
                file.users -= 1
                closing = self._pop_excess()
            for each in closing:
                each.close()

    def _pop_excess(self) -> list[_OpenFile]:
        """Remove and return the least recently used files if too many are open. The caller holds the lock."""
        excess = len(self._open) - _MAX_OPEN_FILES
        idle = [index for index, file in self._open.items() if not file.users] if excess > 0 else []
        return [self._open.pop(index) for index in idle[: max(excess, 0)]]

    def _open_file(self, index: int) -> RandomAccessFile:
        entry = self.manifest.files[index]
        try:
            file = self._folder.open(entry.file)
        except FileNotFoundError:
            raise UserError(f"{self._path(index)} is missing") from None
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            raise UserError(f"{self._path(index)} cannot be read: {error.strerror}") from None
        with self._lock:
            self.files_opened += 1
        if file.size != entry.bytes:
            size = file.size
            file.close()
            raise UserError(f"{self._path(index)} cannot be read: it has {size} bytes, the manifest says {entry.bytes}")
        return file

    def _path(self, index: int) -> str:
        return f"{self._location}/{self.manifest.files[index].file}"

    def _close_all(self) -> None:
        with self._lock:
            files, self._open = list(self._open.values()), {}
        for file in files:
            file.close()


def _read_headers(location: str, manifest: CheckpointManifest, open_file: _OpenFileAt) -> tuple[Locate, int]:
    """Find the slices of a checkpoint of format version 2 or 3, from the headers of all files.

    Returns:
        A function that finds the bytes of any slice, and the number of bytes that were read.

    Raises:
        UserError: A file is missing or damaged, or the slices do not cover each parameter exactly once.
    """
    parts: dict[tuple[str, str], list[tuple[int, Extent, int]]] = {}
    bytes_read = 0
    for index, entry in enumerate(manifest.files):
        with open_file(index) as file:
            try:
                extents, header_bytes = read_header(file)
                for tensor, extent in extents.items():
                    kind, name, start = parse_tensor_name(tensor)
                    parts.setdefault((kind, name), []).append((start, extent, index))
            except ValueError as error:
                raise UserError(f"{location}/{entry.file} cannot be read: {error}") from None
        bytes_read += header_bytes
    _check_slices(location, manifest, parts)

    def locate(kind: str, name: str, start: int, elements: int) -> list[Piece]:
        pieces, stop = [], start + elements
        for first, extent, index in parts.get((kind, name), []):
            begin, end = max(start, first), min(stop, first + extent.numel)
            if begin < end:
                pieces.append(Piece(index, extent.offset + (begin - first) * ITEM_BYTES, end - begin))
        return pieces

    return locate, bytes_read


def _check_slices(
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
