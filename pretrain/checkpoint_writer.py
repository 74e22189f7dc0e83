"""Saving while training goes on: slices are copied (the pause), and a thread writes, hashes and commits them."""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor

from data_prep.files import canonical_json
from pretrain.checkpoint_manifest import (
    MANIFEST,
    CheckpointFile,
    CheckpointManifest,
    commit,
    folder_of_step,
    read_manifest,
)
from pretrain.retention import remove_old, run_of
from pretrain.snapshot import Snapshot
from pretrain.storage import Folder, open_folder

_POLL_S = 0.05
_POLL_BUCKET_S = 0.5
_PATIENCE_S = 1500.0
"""How long a rank waits for another rank's part, or for the commit, before the save counts as failed."""
_CHUNK = 4 * 1024**2

T = TypeVar("T")

log = logging.getLogger("multihop")


class CheckpointWriter:
    """One rank's part in saving. At most one save is under way on all ranks; its error is raised by the next call."""

    def __init__(
        self, checkpoints: str, rank: int, world_size: int, attempt: str, keep: int, keep_every: int | None = None
    ) -> None:
        """Nothing is written yet.

        Args:
            attempt: RUN-START, the beginning of the run's id and that of this start: the same on all ranks, and in
                the names of all files, so that a rank of an earlier start that still writes replaces nothing.
            keep: how many of the newest checkpoints stay.
            keep_every: those of steps that are multiples of this stay for good.
        """
        self.last_pause_s = 0.0
        """How long the last save() held training up by copying."""
        self.last_wait_s = 0.0
        """How long it waited before for the save under way."""
        assert re.fullmatch(r"[0-9A-Za-z_-]+", attempt)
        self._checkpoints = checkpoints
        self._rank, self._world_size, self._attempt = rank, world_size, attempt
        self._keep, self._keep_every = keep, keep_every
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._said: set[str] = set()

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
                for sentence in remove_old(self._checkpoints, self._keep, self._keep_every, run_of(self._attempt)):
                    if sentence not in self._said:
                        log.warning(sentence)
                        self._said.add(sentence)

    def _write_part(self, folder: Folder, manifest: CheckpointManifest) -> None:
        name = folder.location.rsplit("/", 1)[-1]
        if open_folder(self._checkpoints).entries().get(name, "folder") != "folder":
            raise FileExistsError("a link or a file of that name is there, which stays; move it away")
        if folder.size(MANIFEST) is not None:
            self._check_standing(folder, manifest)
            return  # a start that made no step: what is committed is never written over
        entry = self._write_file(folder, f"{self._name(self._rank)}.safetensors")
        content = {"attempt": self._attempt, **entry.model_dump()}
        folder.write_atomically(f"{self._name(self._rank)}.done", canonical_json(content))
        if self._rank != 0:
            self._until(folder, partial(folder.size, MANIFEST), "rank 0's commit")
            return
        files: list[CheckpointFile] = []
        for rank in range(self._world_size):
            look = partial(self._part_or_commit, folder, rank)
            found: CheckpointFile | Literal[True] = self._until(folder, look, f"rank {rank}'s part")
            if found is True:  # another start's: ranks of this one that come to it now write nothing any more
                self._check_standing(folder, manifest)
                return
            files.append(found)
        self._check_whole(folder, files)
        if not commit(folder.location, manifest.model_copy(update={"files": files})):
            self._check_standing(folder, manifest)  # another start's rank 0 was faster

    def _check_standing(self, folder: Folder, manifest: CheckpointManifest) -> None:
        """Whether the checkpoint that stands there is the one to be saved."""
        try:
            standing = read_manifest(folder.location)
        except ValueError as error:
            raise FileExistsError(f"{error}; it stays, move it away") from None
        alike = ("step", "tokens", "updates", "parameters", "data_fingerprint")
        if run_of(standing.run) != run_of(self._attempt) and any(
            getattr(standing, each) != getattr(manifest, each) for each in alike
        ):
            raise FileExistsError("another run's checkpoint is there, which stays; move it away")
        self._check_whole(folder, standing.files)

    def _check_whole(self, folder: Folder, files: list[CheckpointFile]) -> None:
        """That nobody removed a file; a size is all that is looked at."""
        if lacking := [entry.file for entry in files if folder.size(entry.file) != entry.bytes]:
            raise FileNotFoundError(f"{lacking[0]} was removed or changed by another process")

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

    def _part_or_commit(self, folder: Folder, rank: int) -> CheckpointFile | Literal[True] | None:
        """What a rank has written; True where the checkpoint is committed."""
        try:
            entry = json.loads(folder.read_bytes(f"{self._name(rank)}.done"))
        except FileNotFoundError:
            return True if folder.size(MANIFEST) is not None else None
        assert entry.pop("attempt") == self._attempt, "the start stands in the file's name"
        return CheckpointFile.model_validate(entry)

    def _name(self, rank: int) -> str:
        return f"rank-{rank:04d}.{self._attempt}"

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
