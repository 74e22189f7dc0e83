"""Retention of checkpoints: which files are removed at a launch and after a commit.

Only what the run itself wrote is removed or renamed: its id is in its manifests and in the names of its files. Links
and other entries that are not folders are never touched.
"""

import re
from collections.abc import Callable, Collection

from multihop.common.storage import Folder, Kind, open_folder
from multihop.pretrain.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    folder_of_step,
    read_any_manifest,
    read_checkpoint_manifest,
    step_of_folder,
)
from multihop.pretrain.checkpoint.owner import read_owner

_FILE_NAME = re.compile(
    r"\.?(?:rank-[0-9]{4,}|manifest\.json)\.([0-9A-Za-z_]+)(?:-[0-9A-Za-z_-]+)?\.(?:safetensors|done|tmp)(?:\..+\.tmp)?"
)
_FORMAT_2_FILE_NAME = re.compile(
    r"rank-[0-9]{4,}\.(?:safetensors|done)|\.(?:rank-[0-9]{4,}\.(?:safetensors|done)|manifest\.json)\..+\.tmp"
)
"""Names of files of format version 2, which do not have the run's id."""


def run_prefix(name: str | None) -> str | None:
    """The prefix of a run's id, or of RUN-LAUNCH, that the names of the run's files contain."""
    return name.partition("-")[0][:8] if name is not None else None


def sweep(checkpoints: str, resume_from: int | None, launch: str) -> list[str]:
    """Clean up before training (rank 0); returns a log message for everything that was done or left alone.

    Removes the run's files from folders that were never committed, and from committed ones the files of launches other
    than the one that committed. Committed folders newer than `resume_from` did not verify: the run's own are renamed,
    because their steps will be saved again, and kept for inspection.
    """
    log_lines, is_own = [], _make_is_own(checkpoints, run_prefix(launch))
    for step, kind in _steps(checkpoints):
        folder = open_folder(folder_of_step(checkpoints, step))
        name = folder.location.rsplit("/", 1)[-1]
        if kind != "folder":
            in_the_way = resume_from is None or step > resume_from
            log_lines.append(
                f"left {name} alone, which is a {kind} and not a directory"
                + (f": no checkpoint of step {step} can be saved until it is moved away" if in_the_way else "")
            )
        elif folder.size(MANIFEST) is None:
            left = _remove(folder, is_own)
            log_lines.append(
                f"left {name} alone, which contains files that this run did not write ({_first_names(left)})"
                if left
                else f"removed {name}, which was never committed"
            )
        elif resume_from is not None and step <= resume_from:
            _remove_strays(folder, is_own)
        elif _is_own_checkpoint(folder, is_own):
            aside = f"{name}.damaged-{launch.rpartition('-')[2]}"
            folder.move_to(open_folder(checkpoints).child(aside))
            log_lines.append(f"renamed {name}, which does not verify, to {aside}")
        else:
            log_lines.append(
                f"left {name} alone, which does not verify and was not written by this run: no checkpoint of step "
                f"{step} can be saved until it is moved away"
            )
    return log_lines


def remove_old(
    checkpoints: str, keep: int, keep_every: int | None, run: str | None = None, needed: Collection[int] = ()
) -> list[str]:
    """Remove checkpoints older than a run's newest `keep` committed ones, except at multiples of `keep_every` and at
    `needed` steps.

    The manifest is removed first, so that a partly removed checkpoint is no longer committed.

    Args:
        run: The run's id as `run_prefix` returns it; nothing of other runs is removed.

    Returns:
        A log message for everything that was left alone.
    """
    kept, left_alone, is_own = 0, [], _make_is_own(checkpoints, run)
    for step, kind in reversed(_steps(checkpoints)):
        folder = open_folder(folder_of_step(checkpoints, step))
        if kept < keep:
            kept += kind == "folder" and _is_committed(folder, is_own)
            continue
        if step in needed or (keep_every is not None and step % keep_every == 0):
            continue
        name = folder.location.rsplit("/", 1)[-1]
        if kind != "folder":
            left_alone.append(
                f"left {name} alone, which is older than what is kept: it is a {kind} and not a directory"
            )
        elif folder.size(MANIFEST) is not None and not _is_own_checkpoint(folder, is_own):
            left_alone.append(f"left {name} alone, which is older than what is kept: it was not written by this run")
        else:
            folder.remove(MANIFEST)
            folder.sync()  # else a power cut may leave the manifest of files that are gone
            if left := _remove(folder, is_own):
                left_alone.append(
                    f"left {name}, which contains files that this run did not write ({_first_names(left)})"
                )
    return left_alone


_IsOwn = Callable[["str | CheckpointManifest"], bool]


def _make_is_own(checkpoints: str, run: str | None) -> _IsOwn:
    """A function that recognizes a run's manifests, and the names of its files."""
    owner = read_owner(checkpoints)
    since_format_2 = owner is not None and owner.since_format_2 and run_prefix(owner.run) == run

    def is_own(what: str | CheckpointManifest) -> bool:
        if isinstance(what, CheckpointManifest):
            return since_format_2 if what.run is None else run_prefix(what.run) == run
        match = _FILE_NAME.fullmatch(what)
        return (
            run_prefix(match[1]) == run if match else since_format_2 and _FORMAT_2_FILE_NAME.fullmatch(what) is not None
        )

    return is_own


def _steps(checkpoints: str) -> list[tuple[int, Kind]]:
    """The step and kind of each entry that has the name of a checkpoint's folder, oldest first."""
    entries = open_folder(checkpoints).entries()
    steps = [(step_of_folder(name), kind) for name, kind in entries.items()]
    return sorted((step, kind) for step, kind in steps if step is not None)


def _is_committed(folder: Folder, is_own: _IsOwn) -> bool:
    try:
        return is_own(read_checkpoint_manifest(folder.location))
    except ValueError:
        return False


def _is_own_checkpoint(folder: Folder, is_own: _IsOwn) -> bool:
    """Whether the run wrote a checkpoint, by its manifest; if that is damaged, by the names of all files."""
    try:
        return is_own(read_any_manifest(folder.location))
    except ValueError:
        names = [name for name in folder.names() if name != MANIFEST]
        return bool(names) and all(map(is_own, names))


def _remove(folder: Folder, is_own: _IsOwn) -> list[str]:
    """Remove the run's files from a folder without a manifest, and the folder if it is empty; returns the names of what
    is left."""
    for name, kind in folder.entries().items():
        if kind == "file" and is_own(name):
            folder.remove(name)
    return folder.remove_if_empty()


def _remove_strays(folder: Folder, is_own: _IsOwn) -> None:
    """Remove files of the run's other launches from a checkpoint that one launch committed."""
    try:
        manifest = read_checkpoint_manifest(folder.location)
    except ValueError:
        return
    launches = {entry.file.split(".")[1] for entry in manifest.files}
    for name, kind in folder.entries().items():
        if kind == "file" and _FILE_NAME.fullmatch(name) and is_own(name) and name.split(".")[1] not in launches:
            folder.remove(name)


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
