"""Saving while training goes on: slices are copied (the pause), and a thread writes, hashes and commits them."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from torch import Tensor

from data_prep.files import canonical_json
from pretrain.checkpoint import (
    MANIFEST,
    CheckpointFile,
    CheckpointManifest,
    commit,
    folder_of_step,
)
from pretrain.retention import remove_old
from pretrain.snapshot import Snapshot
from pretrain.storage import Folder, open_folder

_POLL_S = 0.05
_POLL_BUCKET_S = 0.5
_PATIENCE_S = 1500.0
"""How long a rank waits for another rank's part, or for the commit, before the save counts as failed."""
_CHUNK = 4 * 1024**2

T = TypeVar("T")


class CheckpointWriter:
    """One rank's part in saving. At most one save is under way on all ranks; its error is raised by the next call."""

    def __init__(
        self, checkpoints: str, rank: int, world_size: int, attempt: str, keep: int, keep_every: int | None = None
    ) -> None:
        """Nothing is written yet.

        Args:
            attempt: the same on all ranks and different at each start: an old rank's leftover is never taken for a
                new one's.
            keep: how many of the newest checkpoints stay.
            keep_every: those of steps that are multiples of this stay for good.
        """
        self.last_pause_s = 0.0
        """How long the last save() held training up by copying."""
        self.last_wait_s = 0.0
        """How long it waited before for the save under way."""
        self._checkpoints = checkpoints
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        self._keep, self._keep_every = keep, keep_every
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def prepare(self, live: dict[str, Tensor]) -> None:
        """Take the memory for copies of `live` now, so that the first save() does not have to."""
        self._snapshot.prepare(live)

    def save(self, live: dict[str, Tensor], manifest: CheckpointManifest) -> None:
        """Copy a rank's slices and write them from the thread, after the save before is committed.

        Args:
            live: "KIND/NAME@START" -> (numel,), of any type and on any device; free to change again on return.
            manifest: without its files; the same on all ranks.

        Raises:
            OSError: the save before this one failed.
        """
        started = time.monotonic()
        self.wait()
        waited = time.monotonic()
        self._snapshot.take(live)
        self.last_wait_s, self.last_pause_s = waited - started, time.monotonic() - waited
        self._under_way = self._thread.submit(self._write, manifest)

    def wait(self) -> None:
        """Until the save under way is committed.

        Raises:
            OSError: it failed; what was committed before is as it was.
        """
        if self._under_way is None:
            return
        save, self._under_way = self._under_way, None
        save.result()

    def _write(self, manifest: CheckpointManifest) -> None:
        location = folder_of_step(self._checkpoints, manifest.step)
        with _explaining(f"step {manifest.step} could not be saved to {location}"):
            self._write_part(open_folder(location), manifest)
        if self._rank == 0:
            with _explaining(f"checkpoints older than {location} could not be removed"):
                remove_old(self._checkpoints, self._keep, self._keep_every)

    def _write_part(self, folder: Folder, manifest: CheckpointManifest) -> None:
        if folder.size(MANIFEST) is not None:
            return  # a start that made no step: what is committed is never written over
        entry = self._write_file(folder, f"rank-{self._rank:04d}.safetensors")
        folder.write_atomically(_done(self._rank), canonical_json({"attempt": self._attempt, **entry.model_dump()}))
        if self._rank == 0:
            files = [
                self._until(folder, partial(self._part_of, folder, rank), f"rank {rank}'s part")
                for rank in range(self._world_size)
            ]
            commit(folder.location, manifest.model_copy(update={"files": files}))
        else:
            self._until(folder, partial(folder.size, MANIFEST), "rank 0's commit")

    def _write_file(self, folder: Folder, name: str) -> CheckpointFile:
        digest, size = hashlib.sha256(), 0
        with folder.writing(name) as file:
            for chunk in self._snapshot.chunks(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
        return CheckpointFile(file=name, bytes=size, sha256=digest.hexdigest())

    def _part_of(self, folder: Folder, rank: int) -> CheckpointFile | None:
        try:
            entry = json.loads(folder.read_bytes(_done(rank)))
        except FileNotFoundError:
            return None
        return CheckpointFile.model_validate(entry) if entry.pop("attempt") == self._attempt else None

    def _until(self, folder: Folder, look: Callable[[], T | None], what: str) -> T:
        deadline = time.monotonic() + _PATIENCE_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} of {folder.location} did not come within {_PATIENCE_S:.0f} s")
            time.sleep(_POLL_S if folder.is_local else _POLL_BUCKET_S)
        return found


@contextmanager
def _explaining(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{what} ({error}); make room or repair the storage, and start again: the checkpoints committed before "
            "are as they were"
        ) from error


def _done(rank: int) -> str:
    return f"rank-{rank:04d}.done"
