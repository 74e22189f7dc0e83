"""Saving while training goes on: slices are copied (the pause), and a thread writes, hashes and commits them."""

import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from data_prep.files import canonical_json, replacing, sha256_file, write_atomically
from pretrain.checkpoint import (
    MANIFEST,
    CheckpointFile,
    CheckpointManifest,
    commit,
    folder_of_step,
    list_steps,
    read_manifest,
)

_POLL_S = 0.05
_PATIENCE_S = 1800.0
"""How long rank 0 waits for the slowest rank's file before the save counts as failed."""


@dataclass
class CheckpointWriter:
    """One rank's part in saving. At most one save is under way; its error is raised by the next call."""

    checkpoints: Path
    rank: int
    world_size: int
    attempt: str
    """The same on all ranks and different at each start: an old rank's leftover is never taken for a new one's."""
    keep: int

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, tensors: dict[str, Tensor], manifest: CheckpointManifest) -> None:
        """Write a checkpoint from the thread, after the one before it is committed.

        Args:
            tensors: copies of this rank's slices; they must not change any more.
            manifest: without its files; the same on all ranks.
        """
        self.wait()
        self._under_way = self._thread.submit(self._write, tensors, manifest)

    def wait(self) -> None:
        """Until the save under way is committed (rank 0) or this rank's part of it is on disk (the others)."""
        if self._under_way is not None:
            save, self._under_way = self._under_way, None
            save.result()

    def _write(self, tensors: dict[str, Tensor], manifest: CheckpointManifest) -> None:
        folder = folder_of_step(self.checkpoints, manifest.step)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{self.rank:04d}.safetensors"
        with replacing(path) as temporary:
            save_file(tensors, temporary)
        entry = CheckpointFile(file=path.name, bytes=path.stat().st_size, sha256=sha256_file(path))
        write_atomically(_done(folder, self.rank), canonical_json({"attempt": self.attempt, **entry.model_dump()}))
        if self.rank == 0:
            files = [self._file_of(folder, rank) for rank in range(self.world_size)]
            commit(folder, manifest.model_copy(update={"files": files}))
            keep_newest(self.checkpoints, self.keep)

    def _file_of(self, folder: Path, rank: int) -> CheckpointFile:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            entry = _read_done(_done(folder, rank))
            if entry is not None and entry.pop("attempt") == self.attempt:
                return CheckpointFile.model_validate(entry)
            time.sleep(_POLL_S)
        raise TimeoutError(f"rank {rank} did not write its part of {folder} within {_PATIENCE_S:.0f} s")


def _done(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:04d}.done"


def _read_done(path: Path) -> dict[str, object] | None:
    try:
        content: dict[str, object] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    return content


def sweep(checkpoints: Path, resume_from: int | None, attempt: str) -> list[str]:
    """Clear the way before a run starts (rank 0): returns a sentence for each thing done.

    What was never committed is removed. Committed folders newer than `resume_from` did not verify: they are renamed
    for a person to look at, because their steps will be saved again.
    """
    done = []
    for step in list_steps(checkpoints):
        folder = folder_of_step(checkpoints, step)
        if not (folder / MANIFEST).exists():
            shutil.rmtree(folder)
            done.append(f"removed {folder.name}, which was never committed")
        elif resume_from is None or step > resume_from:
            folder.rename(folder.with_name(f"{folder.name}.damaged-{attempt}"))
            done.append(f"renamed {folder.name}, which does not verify, to {folder.name}.damaged-{attempt}")
    return done


def keep_newest(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep` committed checkpoints. The manifest goes first: what is half removed is gone."""
    committed = []
    for step in list_steps(checkpoints):
        folder = folder_of_step(checkpoints, step)
        try:
            read_manifest(folder)
        except ValueError:
            continue
        committed.append(folder)
    for folder in committed[:-keep]:
        (folder / MANIFEST).unlink()
        shutil.rmtree(folder)
