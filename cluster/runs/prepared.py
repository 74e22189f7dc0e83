"""Finds or prepares the data set of a run among those that runs share, and links to it."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from multihop.cluster.locks import wait_for_lock
from multihop.cluster.ray.map import Resources, map_on_ray
from multihop.cluster.remote.remote_run import RemoteRun
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.dataset.verify import read_if_intact
from multihop.data_prep.pipeline.identity import ResolvedInputs, resolve_inputs
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import InputFile
from multihop.data_prep.stages.object_store import ObjectStoreStages
from multihop.data_prep.stages.runner import ReportProgress


def get_or_prepare_dataset(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    files: Sequence[InputFile],
    inputs: ResolvedInputs | None,
    store: Path,
    data_folder: Path,
    report: ReportProgress,
    full: bool = False,
    remote: RemoteRun | None = None,
) -> tuple[Path, Manifest]:
    """Return the data set of a run; prepare it on the Ray that the caller has started if it does not exist.

    The data set's folder is named by settings and contents, so that a data set that runs use is never replaced by
    another. On a shared file system, `store` and the sources must have the same paths on every node. Runs that share a
    data set do not wait for each other; whoever has to write into `store` waits for another writer.

    Args:
        files: the input files, from `list_files`.
        inputs: their hashes, from `recall_inputs`; None if files must be hashed first.
        store: folder of the data sets of these sources.
        data_folder: the run's `data`: a link into `store`, nothing yet, or, in a copied run, a folder. A folder is used
            if it holds the data set of the recipe, and refused otherwise.
        full: hash every file of the data set.
        remote: the run in an object store. The data set is downloaded from it if it exists; otherwise the stages'
            outputs go through it, and only what reads texts by their paths runs on this node alone.

    Returns:
        The data set's folder and its manifest; every file of it has its hash.

    Raises:
        UserError: `data_folder` holds something else, or as `prepare`.
        WorkerDiedError: as `map_on_ray`.
    """
    work = work_of(store)
    map_items = map_on_ray if remote is None else partial(map_on_ray, resources=Resources(on_this_node=True))
    if not data_folder.is_symlink() and data_folder.exists():
        if inputs is None:
            with wait_for_lock(store):
                inputs = resolve_inputs(data, tokenizer, files, work, map_items, report)
        manifest = read_if_intact(data_folder, inputs.identity, map_items, report, full)
        if manifest is None:
            raise UserError(
                f"{data_folder} is a directory instead of a link to the prepared data, and it is damaged or was not "
                "made from the present texts and settings; remove it to have it replaced by a link, or "
                "set name=… for a new run"
            )
        return data_folder, manifest
    if inputs is not None:
        folder = store / inputs.identity[:16]
        manifest = read_if_intact(folder, inputs.identity, map_items, report, full)
        if manifest is not None:
            return folder, manifest
    with wait_for_lock(store):
        inputs = resolve_inputs(data, tokenizer, files, work, map_items, report)
        folder = store / inputs.identity[:16]
        if remote is None:
            return folder, prepare(data, tokenizer, folder, map_items, report, work, inputs)
        with remote.lock_preparation(store) as location:
            manifest = read_if_intact(folder, inputs.identity, map_items, report) if remote.fetch_data(folder) else None
            if manifest is None:
                stored = ObjectStoreStages(location, [store], map_on_ray, map_items)
                manifest = prepare(data, tokenizer, folder, map_items, report, work, inputs, stored)
                remote.upload_data(folder)
            return folder, manifest


def link_dataset(link: Path, folder: Path) -> None:
    """Make `link` a link to the data set in `folder`, unless it is that folder; replaces a link to another data set."""
    if link == folder:
        return
    target = os.path.relpath(folder, link.parent)
    if link.is_symlink() and os.readlink(link) != target:
        link.unlink()
    if not link.is_symlink():
        link.symlink_to(target)


def work_of(store: Path) -> Path:
    """Return the folder for outputs of the stages of all data sets in `store`."""
    return store / "work"
