"""Asynchronous saving: slices are copied, which pauses training, and a thread writes, hashes and commits them."""

import hashlib
import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihop.common import clock
from multihop.common.errors import UserError
from multihop.common.files import canonical_json
from multihop.common.s3 import error_reason
from multihop.common.storage import Folder, open_folder
from multihop.pretrain.checkpoint.layout import build_stripes, file_order, kinds_and_slices
from multihop.pretrain.checkpoint.manifest import (
    MANIFEST,
    CheckpointFile,
    CheckpointManifest,
    commit,
    folder_of_step,
    read_checkpoint_manifest,
)
from multihop.pretrain.checkpoint.retention import remove_old, run_prefix
from multihop.pretrain.checkpoint.tensor_file import header_of

_FIRST_POLL_S, _MAX_POLL_S = 0.02, 1.0
_BUCKET_POLLS = 5
"""Factor of the time between two polls of a bucket, where each poll is a request."""
_TIMEOUT_S = 1500.0
"""Seconds that a rank waits for the other ranks' parts, or for the commit, before the save fails."""
_CHUNK = 4 * 1024**2
_READ_THREADS = 16
_MAX_PART_BYTES = 64 * 2**20

log = logging.getLogger("multihop")


class _Part(NamedTuple):
    """The content of a rank's .done file: the file it wrote, and the slices in it."""

    entry: CheckpointFile
    kinds: dict[str, list[str]]
    """Parameter -> the kinds of its slices."""
    slices: NDArray[np.int64]
    """int64 (slices, 3), as `Slices`."""


class Snapshot:
    """A buffer in host memory for a rank's slices, in the layout of its file; every save reuses it.

    Copying into new memory spends most of the time on the first touch of each page (five sixths in a measurement).
    """

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        """Name -> number of elements, in the order of the file; without empty tensors."""
        self._header = header_of({})
        self._flat = torch.empty(0)
        self._views: dict[str, Tensor] = {}

    def prepare(self, live: dict[str, Tensor]) -> None:
        """Allocate the buffer for tensors of these names and sizes, and touch it; pinned if any is on a GPU.

        Raises:
            UserError: a name is not KIND/NAME@START.
        """
        lengths = {key: live[key].numel() for key in sorted(live, key=file_order) if live[key].numel()}
        if lengths == self.tensors:
            return
        self._flat, self._views = torch.empty(0), {}  # frees the old buffer first
        pinned = any(tensor.is_cuda for tensor in live.values())
        self._flat = torch.empty(sum(lengths.values()), dtype=torch.float32, pin_memory=pinned).zero_()
        self._views = dict(zip(lengths, self._flat.split(list(lengths.values())), strict=True))
        self._header = header_of(lengths)
        self.tensors = lengths

    @torch.no_grad()
    def take(self, live: dict[str, Tensor]) -> None:
        """Copy tensors of any dtype and device as float32; they may change after the return."""
        self.prepare(live)
        for key, view in self._views.items():
            view.copy_(live[key].view(-1), non_blocking=True)
        if self._flat.is_pinned():
            torch.cuda.synchronize()

    def chunks(self, length: int) -> Iterator[memoryview]:
        """The file's bytes in order, `length` at a time."""
        for part in (memoryview(self._header), self._flat.numpy().view(np.uint8).data):
            for start in range(0, len(part), length):
                yield part[start : start + length]


class CheckpointWriter:
    """Saves one rank's part of checkpoints. At most one save is in progress; the next call raises its error."""

    def __init__(
        self,
        checkpoints: str,
        rank: int,
        world_size: int,
        launch: str,
        keep: int,
        keep_every: int | None = None,
        needed: Callable[[], Collection[int]] = frozenset,
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        """Set up the writer; this writes nothing.

        Args:
            launch: RUN-LAUNCH, the prefixes of the run's id and of this launch's: the same on all ranks. It is in the
                names of all files, so that a rank of an earlier launch that is still writing replaces nothing.
            keep: The number of newest checkpoints that are kept.
            keep_every: Checkpoints of steps that are multiples of this are never removed.
            needed: Called by rank 0's thread after a commit: the steps of older checkpoints that are needed longer.
            before_commit: Called by rank 0's thread; the save fails if it raises an OSError.
        """
        self.last_pause_s = 0.0
        """Seconds for which the last save() paused training to copy the slices."""
        self.last_wait_s = 0.0
        """Seconds for which the last save() waited for the previous one before that."""
        assert re.fullmatch(r"[0-9A-Za-z_-]+", launch)
        self._checkpoints = checkpoints
        self._rank, self._world_size, self._launch = rank, world_size, launch
        self._keep, self._keep_every, self._needed, self._before_commit = keep, keep_every, needed, before_commit
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_progress: Future[None] | None = None
        self._logged: set[str] = set()

    def prepare(self, live: dict[str, Tensor]) -> None:
        """Allocate the memory for copies of `live`, so that the first save() does not have to."""
        self._snapshot.prepare(live)

    def save(self, live: dict[str, Tensor], manifest: CheckpointManifest) -> None:
        """Copy a rank's slices and write them from a thread, once the previous save is committed.

        Args:
            live: "KIND/NAME@START" -> (numel,), of any dtype and on any device; may change after the return.
            manifest: The manifest without files, kinds and stripes; the same on all ranks.

        Raises:
            OSError: The previous save failed.
            UserError: In the previous save, the ranks' slices did not cover each parameter exactly once.
        """
        started = time.monotonic()
        self.wait()
        waited = time.monotonic()
        self._snapshot.take(live)
        self.last_wait_s, self.last_pause_s = waited - started, time.monotonic() - waited
        self._in_progress = self._thread.submit(self._write, manifest)

    def wait(self) -> None:
        """Wait until the save in progress is committed.

        Raises:
            OSError: It failed; earlier checkpoints are unchanged.
            UserError: The ranks' slices did not cover each parameter exactly once.
        """
        if self._in_progress is None:
            return
        save, self._in_progress = self._in_progress, None
        save.result()

    def _write(self, manifest: CheckpointManifest) -> None:
        location = folder_of_step(self._checkpoints, manifest.step)
        with _explain_os_errors(f"step {manifest.step} could not be saved to {location}"):
            self._write_part(open_folder(location), manifest)
        if self._rank == 0:
            for sentence in self._remove_old():
                if sentence not in self._logged:
                    log.warning(sentence)
                    self._logged.add(sentence)

    def _remove_old(self) -> list[str]:
        """Remove old checkpoints; returns log messages. A removal that fails is tried again after the next save."""
        try:
            needed = self._needed()
            return remove_old(self._checkpoints, self._keep, self._keep_every, run_prefix(self._launch), needed)
        except OSError as error:
            return [
                f"could not remove older checkpoints from {self._checkpoints} ({error_reason(error)}); tries again at "
                "the next save"
            ]

    def _write_part(self, folder: Folder, manifest: CheckpointManifest) -> None:
        name = folder.location.rsplit("/", 1)[-1]
        if open_folder(self._checkpoints).entries().get(name, "folder") != "folder":
            raise FileExistsError("a link or a file has that name and is kept; move it away")
        if folder.size(MANIFEST) is not None:
            self._check_committed(folder, manifest)
            return  # this launch took no step: a committed checkpoint is never overwritten
        kinds, slices = kinds_and_slices(self._snapshot.tensors, manifest.parameters)
        entry = self._write_file(folder, f"{self._name(self._rank)}.safetensors")
        content = {"launch": self._launch, "kinds": kinds, "slices": slices, **entry.model_dump()}
        folder.write_atomically(f"{self._name(self._rank)}.done", canonical_json(content))
        if self._rank == 0:
            self._commit(folder, manifest)
            return
        for _ in _polls(folder, lambda: "rank 0's commit"):
            if folder.size(MANIFEST) is not None:
                return

    def _commit(self, folder: Folder, manifest: CheckpointManifest) -> None:
        parts = self._gather_parts(folder)
        if parts is None:  # ranks of this launch that are slower write nothing
            self._check_committed(folder, manifest)
            return
        files = [part.entry for part in parts]
        self._check_present(folder, files)
        contents = {"files": files, **_kinds_of(parts)}
        stripes = build_stripes(manifest.parameters, [part.slices for part in parts])
        self._before_commit()
        if not commit(folder.location, manifest.model_copy(update={**contents, "stripes": stripes})):
            self._check_committed(folder, manifest)  # rank 0 of another launch was faster

    def _gather_parts(self, folder: Folder) -> list[_Part] | None:
        """Each rank's part; None: another launch has committed this checkpoint.

        The folder is polled with one listing, whatever the number of ranks, and each part is read once.
        """
        waiting = {f"{self._name(rank)}.done": rank for rank in range(self._world_size)}
        parts: dict[int, _Part] = {}
        shared: dict[tuple[str, ...], list[str]] = {}
        with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="parts") as threads:
            for _ in _polls(folder, lambda: f"rank {min(waiting.values())}'s part"):
                names = set(folder.names())
                if MANIFEST in names:
                    return None
                done = sorted(waiting.keys() & names)
                read = threads.map(lambda name: self._read_part(folder, name, shared), done)
                for name, part in zip(done, read, strict=True):
                    parts[waiting.pop(name)] = part
                if not waiting:
                    break
        return [parts[rank] for rank in range(self._world_size)]

    def _read_part(self, folder: Folder, name: str, shared: dict[tuple[str, ...], list[str]]) -> _Part:
        """Read a .done file; equal kinds of all parts are one list of `shared`."""
        content = json.loads(folder.read_bytes(name, _MAX_PART_BYTES))
        assert content.pop("launch") == self._launch, "the file's name says so"
        # Compact: a thousand ranks of ZeRO-3 have a million slices, whose lists and names would take most of a GB.
        kinds = {sys.intern(name): shared.setdefault(tuple(each), each) for name, each in content.pop("kinds").items()}
        slices = np.array(content.pop("slices"), np.int64).reshape(-1, 3)
        return _Part(CheckpointFile.model_validate(content), kinds, slices)

    def _check_committed(self, folder: Folder, manifest: CheckpointManifest) -> None:
        """Check that the committed checkpoint is the one to save."""
        try:
            committed = read_checkpoint_manifest(folder.location)
        except ValueError as error:
            raise FileExistsError(f"{error}; it is kept, move it away") from None
        compared = ("step", "tokens", "updates", "parameters", "data_fingerprint")
        if run_prefix(committed.run) != run_prefix(self._launch) and any(
            getattr(committed, each) != getattr(manifest, each) for each in compared
        ):
            raise FileExistsError("another run's checkpoint has that name and is kept; move it away")
        self._check_present(folder, committed.files)

    def _check_present(self, folder: Folder, files: list[CheckpointFile]) -> None:
        """Check, with one listing, that no file was removed."""
        names = set(folder.names())
        if missing := [entry.file for entry in files if entry.file not in names]:
            raise FileNotFoundError(f"{missing[0]} was removed by another process")

    def _write_file(self, folder: Folder, name: str) -> CheckpointFile:
        digest, size = hashlib.sha256(), 0

        def chunks() -> Iterator[memoryview]:
            nonlocal size
            for chunk in self._snapshot.chunks(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        folder.write(name, chunks())
        return CheckpointFile(file=name, bytes=size, sha256=digest.hexdigest())

    def _name(self, rank: int) -> str:
        return f"rank-{rank:04d}.{self._launch}"


def _kinds_of(parts: list[_Part]) -> dict[str, Any]:
    """The manifest's `kinds`, those of most parameters, and `other_kinds`.

    Raises:
        UserError: Ranks saved different kinds of slices of one parameter.
    """
    of_parameters: dict[str, list[str]] = {}
    for part in parts:
        for name, kinds in part.kinds.items():
            if of_parameters.setdefault(name, kinds) != kinds:
                raise UserError(
                    f"the ranks must save slices of the same kinds; of {name} they saved "
                    f"{', '.join(of_parameters[name])}, and {', '.join(kinds)}"
                )
    if not of_parameters:
        raise UserError("the ranks must save at least one slice; they saved none")
    ((most_common, _),) = Counter(map(tuple, of_parameters.values())).most_common(1)
    most = list(most_common)
    return {"kinds": most, "other_kinds": {name: kinds for name, kinds in of_parameters.items() if kinds != most}}


def _polls(folder: Folder, what: Callable[[], str]) -> Iterator[None]:
    """Yield whenever `folder` should be polled, at growing intervals.

    Raises:
        TimeoutError: `what` did not appear in time.
    """
    deadline, pause = clock.monotonic() + _TIMEOUT_S, _FIRST_POLL_S
    while True:
        yield
        if clock.monotonic() > deadline:
            raise TimeoutError(f"{what()} of {folder.location} did not come within {_TIMEOUT_S:.0f} s")
        clock.sleep(pause if folder.is_local else pause * _BUCKET_POLLS)
        pause = min(1.5 * pause, _MAX_POLL_S)


@contextmanager
def _explain_os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{what} ({error_reason(error)}); make room or repair the storage, and rerun the same command to resume: "
            "earlier checkpoints are unchanged"
        ) from error
