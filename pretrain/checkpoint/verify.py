"""Verification of checkpoints by hash, and the newest good checkpoint of a run.

This is for a single process; in `verify_shared` the ranks of a run share the work.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from multihop.common.errors import UserError
from multihop.common.storage import RandomAccessFile, open_folder
from multihop.pretrain.checkpoint.layout import Layout
from multihop.pretrain.checkpoint.manifest import (
    CheckpointFile,
    CheckpointManifest,
    folder_of_step,
    layout_of,
    read_checkpoint_manifest,
    step_of_folder,
)
from multihop.pretrain.checkpoint.reader import UNREADABLE, CheckpointReader
from multihop.pretrain.checkpoint.tensor_file import header_of

_THREADS = 8

Check = Callable[[], str | None]
"""Returns a sentence about the damage, or None."""


def verify(location: str) -> CheckpointManifest:
    """Read every file and compare it with its hash; returns the manifest.

    Raises:
        UserError: A file is missing or damaged; the message names the first one.
    """
    manifest = read_checkpoint_manifest(location)
    for damage in find_damage(location, manifest):
        raise UserError(damage)
    return manifest


def find_damage(location: str, manifest: CheckpointManifest) -> list[str]:
    """Read all files of a checkpoint; returns a sentence for each missing or damaged one."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify") as threads:  # hashing releases the GIL
        results = list(threads.map(lambda check: check(), file_checks(location, manifest)))
    damaged = [damage for damage in results if damage is not None]
    return damaged or [damage for damage in [check_headers(location, manifest)] if damage is not None]


def file_checks(location: str, manifest: CheckpointManifest) -> list[Check]:
    """A function for each file that hashes the whole file and compares its header with the manifest."""
    layout = layout_of(manifest)
    return [partial(_check_file, location, entry, layout, index) for index, entry in enumerate(manifest.files)]


def check_headers(location: str, manifest: CheckpointManifest) -> str | None:
    """Check, for format versions 2 and 3, that the headers of all files together have the parameters' slices."""
    if manifest.stripes is None:
        try:
            with CheckpointReader(location, manifest):
                pass
        except ValueError as error:
            return str(error)
    return None


def _check_file(location: str, entry: CheckpointFile, layout: Layout | None, index: int) -> str | None:
    path = f"{location}/{entry.file}"
    try:
        with open_folder(location).open(entry.file) as file:
            if file.size != entry.bytes:
                return f"{path} is damaged: it has {file.size} bytes, the manifest says {entry.bytes}"
            digest = hashlib.sha256()
            for chunk in file.chunks():
                digest.update(chunk)
            if digest.hexdigest() != entry.sha256:
                return f"{path} is damaged: its SHA-256 is not the manifest's"
            if layout is not None and not _has_header(file, header_of(layout.tensors_of(index))):
                return f"{path} is damaged: its header does not have the slices that the manifest says"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return f"{path} is damaged: it cannot be read ({error.strerror})"
    return None


def _has_header(file: RandomAccessFile, header: bytes) -> bool:
    return file.read_at(0, len(header)) == header


def list_steps(checkpoints: str) -> list[int]:
    """The steps that have a folder or a link to one, committed or not; oldest first."""
    entries = open_folder(checkpoints).entries()
    steps = [step_of_folder(name) for name, kind in entries.items() if kind != "file"]
    return sorted(step for step in steps if step is not None)


def committed_steps(checkpoints: str) -> Iterator[int]:
    """The steps whose manifest is valid, newest first; their files are not read."""
    for step in reversed(list_steps(checkpoints)):
        try:
            read_checkpoint_manifest(folder_of_step(checkpoints, step))
        except ValueError:  # never committed, or damaged
            continue
        yield step


def newest_step(checkpoints: str) -> int | None:
    """The newest step whose manifest is valid; its files are not read."""
    return next(committed_steps(checkpoints), None)


def newest_good(checkpoints: str) -> tuple[CheckpointManifest | None, list[str]]:
    """The newest checkpoint that verifies, and a sentence for each damaged file of newer ones."""
    rejected: list[str] = []
    for step in reversed(list_steps(checkpoints)):
        location = folder_of_step(checkpoints, step)
        try:
            manifest = read_checkpoint_manifest(location)
        except ValueError as error:
            rejected.append(str(error))
            continue
        if not (damaged := find_damage(location, manifest)):
            return manifest, rejected
        rejected += damaged
    return None, rejected


def load_weights(checkpoint: str) -> dict[str, Tensor]:
    """Verify a committed checkpoint; returns its whole fp32 weights by parameter name.

    Raises:
        UserError: A file is missing or damaged.
    """
    with CheckpointReader(checkpoint, verify(checkpoint)) as reader:
        return dict(reader.weights())
