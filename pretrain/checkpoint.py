"""The checkpoint format: named slices in safetensors, and a manifest that is the commit.

    checkpoints/step-00001000/  rank-0000.RUN-START.safetensors  rank-0000.RUN-START.done  …  manifest.json

A tensor is called KIND/NAME@START: the fp32 elements from START on of the flattened parameter NAME, or of one of its
optimizer moments. Any number of ranks reads what it needs of them, whoever wrote them. A folder without a valid
manifest does not exist for anybody. RUN and START tell the files of one run, and of one start of it, from any others.
Where checkpoints stand is a string: a folder's path or s3://BUCKET/PREFIX.
"""

import errno
import hashlib
import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.checkpoint_manifest import (
    MANIFEST,
    CheckpointFile,
    CheckpointManifest,
    folder_of_step,
    read_manifest,
    step_of_folder,
)
from pretrain.storage import Folder, Source, open_folder
from pretrain.tensor_file import ITEM_BYTES, Extent, read_header

__all__ = [
    "MANIFEST",
    "CheckpointManifest",
    "CheckpointReader",
    "damages",
    "folder_of_step",
    "list_steps",
    "load_weights",
    "newest_good",
    "newest_step",
    "parse_key",
    "read_manifest",
    "verify",
]

_THREADS = 8
_START = re.compile(r"0|[1-9][0-9]{0,17}")


def verify(location: str) -> CheckpointManifest:
    """The manifest, after every file was read and compared with its hash.

    Raises:
        ValueError: with the name of the first file that is missing or damaged.
    """
    manifest = read_manifest(location)
    for damage in damages(location, manifest):
        raise ValueError(damage)
    return manifest


def damages(location: str, manifest: CheckpointManifest) -> list[str]:
    """A sentence for each file of a checkpoint that is missing or not as it was written; all of them are read.

    Files that are as they were written and hold other slices than the manifest's parameters have are one more.
    """
    folder = open_folder(location)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:  # hashing lets other threads run
        found = threads.map(lambda entry: _damage(folder, entry), manifest.files)
        damaged = [damage for damage in found if damage is not None]
    if not damaged:
        try:
            CheckpointReader(location, manifest).__enter__().__exit__()
        except ValueError as error:
            return [str(error)]
    return damaged


_DAMAGED = (errno.EIO, errno.EINVAL, errno.EISDIR)
"""The disk cannot read it, or it is no regular file. Nobody may take a network that is down for a damaged file."""


def _damage(folder: Folder, entry: CheckpointFile) -> str | None:
    path = f"{folder.location}/{entry.file}"
    try:
        with folder.open(entry.file) as file:
            if file.size != entry.bytes:
                return f"{path} is damaged: it has {file.size} bytes, the manifest says {entry.bytes}"
            digest = hashlib.sha256()
            for chunk in file.chunks():
                digest.update(chunk)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        if error.errno not in _DAMAGED:
            raise
        return f"{path} is damaged: it cannot be read ({error.strerror})"
    return None if digest.hexdigest() == entry.sha256 else f"{path} is damaged: its SHA-256 is not the manifest's"


def list_steps(checkpoints: str) -> list[int]:
    """Steps that have a folder or a link to one, committed or not, oldest first."""
    entries = open_folder(checkpoints).entries()
    steps = [step_of_folder(name) for name, kind in entries.items() if kind != "file"]
    return sorted(step for step in steps if step is not None)


def newest_step(checkpoints: str) -> int | None:
    """The newest step whose manifest is valid; its files are not read."""
    for step in reversed(list_steps(checkpoints)):
        try:
            read_manifest(folder_of_step(checkpoints, step))
        except ValueError:
            continue
        return step
    return None


def newest_good(checkpoints: str) -> tuple[CheckpointManifest | None, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over."""
    passed_over: list[str] = []
    for step in reversed(list_steps(checkpoints)):
        try:
            return verify(folder_of_step(checkpoints, step)), passed_over
        except ValueError as error:
            passed_over.append(str(error))
    return None, passed_over


class CheckpointReader:
    """Reads any slice of a committed checkpoint, from any thread. A context manager: its files are open meanwhile."""

    def __init__(self, location: str, manifest: CheckpointManifest | None = None) -> None:
        """Nothing is opened yet.

        Args:
            manifest: the one at `location`, where it was read already.
        """
        self.manifest = manifest or read_manifest(location)
        self.bytes_read = 0
        """From the ranks' files so far: their headers and the slices asked for."""
        self._location = location
        self._stack = ExitStack()
        self._lock = Lock()
        self._parts: dict[tuple[str, str], list[tuple[int, Extent, Source]]] = {}

    def __enter__(self) -> "CheckpointReader":
        """Open all files.

        Raises:
            ValueError: one is missing or no such file, or the slices are not each parameter's, once and whole.
        """
        folder = open_folder(self._location)
        with ExitStack() as stack:
            for entry in self.manifest.files:
                path = f"{self._location}/{entry.file}"
                try:
                    file = stack.enter_context(folder.open(entry.file))
                    if file.size != entry.bytes:
                        raise ValueError(f"it has {file.size} bytes, the manifest says {entry.bytes}")
                    extents, header_bytes = read_header(file)
                    for key, extent in extents.items():
                        kind, name, start = parse_key(key)
                        self._parts.setdefault((kind, name), []).append((start, extent, file))
                except FileNotFoundError:
                    raise ValueError(f"{path} is missing") from None
                except ValueError as error:
                    raise ValueError(f"{path} cannot be read: {error}") from None
                except OSError as error:
                    if error.errno not in _DAMAGED:
                        raise
                    raise ValueError(f"{path} cannot be read: {error.strerror}") from None
                self.bytes_read += header_bytes
            self._check_slices()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _check_slices(self) -> None:
        numels = {name: math.prod(shape) for name, shape in self.manifest.parameters.items()}
        for (kind, name), parts in self._parts.items():
            parts.sort(key=lambda part: (part[0], part[1].numel))
            stop = 0
            for start, extent, _ in parts:
                if start != stop:
                    raise ValueError(f"{self._location} has {kind}/{name} up to element {stop}, and then from {start}")
                stop += extent.numel
            if stop != numels.get(name):
                raise ValueError(
                    f"{self._location} holds {stop} elements of {kind}/{name}, the manifest says {numels.get(name)}"
                )
        for name in numels:
            if ("weight", name) not in self._parts:
                raise ValueError(f"{self._location} holds nothing of weight/{name}, which the manifest names")

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """float32 (numel,) from `start` on; only those bytes are read.

        Raises:
            ValueError: the checkpoint does not hold all of it.
        """
        wanted, filled = [], 0
        for first, extent, file in self._parts.get((kind, name), []):
            skip = start + filled - first  # elements of this part before the first one that is still wanted
            count = min(numel - filled, extent.numel - skip)
            if skip < 0:
                break
            if count > 0:
                wanted.append((file, extent.offset + skip * ITEM_BYTES, count))
                filled += count
        if filled != numel:
            raise ValueError(f"{self._location} holds {filled} of {numel} elements of {kind}/{name} from {start} on")
        out, filled = np.empty(numel, np.dtype("<f4")), 0
        for file, offset, count in wanted:
            out[filled : filled + count] = self._floats(file, offset, count)
            filled += count
        return torch.from_numpy(out)

    def _floats(self, file: Source, offset: int, count: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
        data = file.read_at(offset, count * ITEM_BYTES)
        if len(data) != count * ITEM_BYTES:
            raise ValueError(f"a file of {self._location} became shorter while it was read")
        with self._lock:
            self.bytes_read += len(data)
        return np.frombuffer(data, np.dtype("<f4"))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, by name."""

        def whole(parameter: tuple[str, list[int]]) -> tuple[str, Tensor]:
            name, shape = parameter
            return name, self.read("weight", name, 0, math.prod(shape)).view(shape)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="read") as threads:  # a bucket answers slowly, but many
            yield from threads.map(whole, self.manifest.parameters.items())


def parse_key(key: str) -> tuple[str, str, int]:
    """KIND/NAME@START in its three parts.

    Raises:
        ValueError: it is not so made.
    """
    kind, slash, rest = key.partition("/")
    name, at, start = rest.rpartition("@")
    if not (kind and slash and name and at and _START.fullmatch(start)):
        raise ValueError(f"tensor {key[:200]!r} is not called KIND/NAME@START")
    return kind, name, int(start)


def load_weights(checkpoint: str) -> dict[str, Tensor]:
    """The fp32 weights of a committed checkpoint, whole, by parameter name; all of it is read and verified first.

    Raises:
        ValueError: as `verify`.
    """
    with CheckpointReader(checkpoint, verify(checkpoint)) as reader:
        return dict(reader.weights())
