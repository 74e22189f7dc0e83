"""Which checkpoints stay: what a start clears away, and what a commit makes superfluous.

Nothing is removed or renamed that the run did not write itself: its id stands in its manifests and in the names of its
files. What is no folder, a link to one among them, is never touched.
"""

import re
from collections.abc import Callable

from pretrain.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
    folder_of_step,
    read_any_manifest,
    read_manifest,
    step_of_folder,
)
from pretrain.run_files import read_owner
from pretrain.storage import Folder, Kind, open_folder

_NAMED = re.compile(
    r"\.?(?:rank-[0-9]{4,}|manifest\.json)\.([0-9A-Za-z_]+)(?:-[0-9A-Za-z_-]+)?\.(?:safetensors|done|tmp)(?:\..+\.tmp)?"
)
_UNNAMED = re.compile(
    r"rank-[0-9]{4,}\.(?:safetensors|done)|\.(?:rank-[0-9]{4,}\.(?:safetensors|done)|manifest\.json)\..+\.tmp"
)
"""As the first two format versions called them."""


def run_of(name: str | None) -> str | None:
    """What stands for a run in the names of its files: of its id, or of an attempt of it."""
    return name.partition("-")[0][:8] if name is not None else None


def sweep(checkpoints: str, resume_from: int | None, attempt: str) -> list[str]:
    """Clear the way before a run starts (rank 0): returns a sentence for each thing done, or left alone.

    Of what was never committed the run's files are removed, and in what was committed those of other starts than the
    one that committed it. Committed folders newer than `resume_from` did not verify: the run's are renamed for a person
    to look at, because their steps will be saved again.
    """
    said, is_own = [], _own(checkpoints, run_of(attempt))
    for step, kind in _steps(checkpoints):
        folder = open_folder(folder_of_step(checkpoints, step))
        name = folder.location.rsplit("/", 1)[-1]
        if kind != "folder":
            in_the_way = resume_from is None or step > resume_from
            said.append(
                f"left {name} alone, which is a {kind} and no folder"
                + (f": no checkpoint of step {step} can be saved before it is moved away" if in_the_way else "")
            )
        elif folder.size(MANIFEST) is None:
            left = _remove(folder, is_own)
            said.append(
                f"left {name} alone, in which files stand that this run did not write ({_some(left)})"
                if left
                else f"removed {name}, which was never committed"
            )
        elif resume_from is not None and step <= resume_from:
            _remove_strays(folder, is_own)
        elif _is_own_checkpoint(folder, is_own):
            aside = f"{name}.damaged-{attempt.rpartition('-')[2]}"
            folder.move_to(open_folder(checkpoints).child(aside))
            said.append(f"renamed {name}, which does not verify, to {aside}")
        else:
            said.append(
                f"left {name} alone, which does not verify and was not written by this run: no checkpoint of step "
                f"{step} can be saved before it is moved away"
            )
    return said


def remove_old(checkpoints: str, keep: int, keep_every: int | None, run: str | None = None) -> list[str]:
    """Remove what is older than a run's newest `keep` committed checkpoints, but for multiples of `keep_every`.

    The manifest goes first: what is half removed is gone.

    Args:
        run: as `run_of` tells it; nothing is removed of any other's.

    Returns:
        A sentence for each thing that was left alone.
    """
    kept, left_alone, is_own = 0, [], _own(checkpoints, run)
    for step, kind in reversed(_steps(checkpoints)):
        folder = open_folder(folder_of_step(checkpoints, step))
        if kept < keep:
            kept += kind == "folder" and _is_committed(folder, is_own)
            continue
        if keep_every is not None and step % keep_every == 0:
            continue
        name = folder.location.rsplit("/", 1)[-1]
        if kind != "folder":
            left_alone.append(f"left {name} alone, which is older than what stays: it is a {kind} and no folder")
        elif folder.size(MANIFEST) is not None and not _is_own_checkpoint(folder, is_own):
            left_alone.append(f"left {name} alone, which is older than what stays: it was not written by this run")
        else:
            folder.remove(MANIFEST)
            if left := _remove(folder, is_own):
                left_alone.append(f"left {name}, in which files stand that this run did not write ({_some(left)})")
    return left_alone


_IsOwn = Callable[["str | CheckpointManifest"], bool]


def _own(checkpoints: str, run: str | None) -> _IsOwn:
    """Tells a run's manifests, and names of its files, from any others."""
    owner = read_owner(checkpoints)
    since_ever = owner is not None and owner.since_format_2 and run_of(owner.run) == run

    def is_own(what: str | CheckpointManifest) -> bool:
        if isinstance(what, CheckpointManifest):
            return since_ever if what.run is None else run_of(what.run) == run
        match = _NAMED.fullmatch(what)
        return run_of(match[1]) == run if match else since_ever and _UNNAMED.fullmatch(what) is not None

    return is_own


def _steps(checkpoints: str) -> list[tuple[int, Kind]]:
    """What is called as a checkpoint's folder is, oldest first, and what it is."""
    entries = open_folder(checkpoints).entries()
    found = [(step_of_folder(name), kind) for name, kind in entries.items()]
    return sorted((step, kind) for step, kind in found if step is not None)


def _is_committed(folder: Folder, is_own: _IsOwn) -> bool:
    try:
        return is_own(read_manifest(folder.location))
    except ValueError:
        return False


def _is_own_checkpoint(folder: Folder, is_own: _IsOwn) -> bool:
    """By its manifest; by the names of all files where that is damaged."""
    try:
        return is_own(read_any_manifest(folder.location))
    except ValueError:
        names = [name for name in folder.names() if name != MANIFEST]
        return bool(names) and all(map(is_own, names))


def _remove(folder: Folder, is_own: _IsOwn) -> list[str]:
    """The run's files in a folder without a manifest, and the folder where nothing else is in it: the names of that."""
    for name, kind in folder.entries().items():
        if kind == "file" and is_own(name):
            folder.remove(name)
    return folder.remove_if_empty()


def _remove_strays(folder: Folder, is_own: _IsOwn) -> None:
    """What other starts of the run wrote into a checkpoint that one of them had committed."""
    try:
        manifest = read_manifest(folder.location)
    except ValueError:
        return
    starts = {entry.file.split(".")[1] for entry in manifest.files}
    for name, kind in folder.entries().items():
        if kind == "file" and _NAMED.fullmatch(name) and is_own(name) and name.split(".")[1] not in starts:
            folder.remove(name)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
