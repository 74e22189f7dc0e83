"""The data set that a folder holds, if it is made from the given inputs and its files are whole."""

from functools import partial
from pathlib import Path

from multihop.common.mapping import MapItems, ReportProgress, map_in_process, no_report, reporting
from multihop.data_prep.dataset.manifest import Manifest, read_data_manifest
from multihop.data_prep.dataset.verify import is_verified, verify_files


def find_verified(folder: Path, identity: str) -> Manifest | None:
    """The data set in `folder`, if it is of `identity` and all its files were hashed before and are unchanged since.

    Reads the manifest and `verified.json`, and the size and modification time of each file: nothing is hashed or
    written. None also means: ask `find_whole`, which hashes.

    Args:
        identity: `ResolvedInputs.identity`, of the settings and the input.
    """
    manifest = _made_from(folder, identity)
    return manifest if manifest is not None and is_verified(folder, manifest) else None


def find_whole(
    folder: Path,
    identity: str,
    map_items: MapItems = map_in_process,
    report: ReportProgress = no_report,
    full: bool = False,
) -> Manifest | None:
    """The data set in `folder`, if it is of `identity` and all its files have their hashes.

    Files that changed since they were last hashed are hashed by `map_items` as the stage "verify", and remembered. Any
    number of callers may ask at once, also while one prepares.

    Args:
        identity: as in `find_verified`.
        full: hash every file.
    """
    manifest = _made_from(folder, identity)
    if manifest is None:
        return None
    return None if verify_files(folder, manifest, partial(reporting(map_items, report), "verify"), full) else manifest


def _made_from(folder: Path, identity: str) -> Manifest | None:
    try:
        manifest = read_data_manifest(folder)
    except ValueError:
        return None
    return manifest if manifest.inputs == identity else None
