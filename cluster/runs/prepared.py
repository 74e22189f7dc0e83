"""The data set of a run: found or prepared in the store that runs share, and linked to."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from multihop.cluster.ray.map import Resources, map_on_ray
from multihop.cluster.runs.folder import wait_for_lock
from multihop.cluster.runs.remote_run import RemoteRun
from multihop.common.errors import UserError
from multihop.data_prep.config import DataConfig, TokenizerConfig
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.dataset.verify import read_if_intact
from multihop.data_prep.pipeline.identity import ResolvedInputs, resolve_inputs
from multihop.data_prep.pipeline.prepare import prepare
from multihop.data_prep.reading.sources import InputFile
from multihop.data_prep.stages.object_store import ObjectStoreStages
from multihop.data_prep.stages.runner import ReportProgress


def provide(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    files: Sequence[InputFile],
    inputs: ResolvedInputs | None,
    store: Path,
    place: Path,
    report: ReportProgress,
    full: bool = False,
    home: RemoteRun | None = None,
) -> tuple[Path, Manifest]:
    """Find the data set of a run, or prepare it on the Ray that the caller has started.

    The data set's folder is named by settings and contents, so that a data set that runs use is never replaced by
    another. Without a home, `store` and the sources must have the same paths on every node. Runs that share a data set
    do not wait for each other; whoever has to write into `store` waits for another writer.

    Args:
        files: the input files, as `list_files` lists them.
        inputs: what `recall_inputs` knows of them.
        store: the data sets of these sources.
        place: where the run has its data: a link into `store`, nothing yet, or, in a copied run, a folder. A folder is
            used if it holds what the recipe asks for, and refused otherwise.
        full: hash every file of the data set.
        home: of the run, if it has one in an object store. The data set is fetched from it if it is there; if not,
            the stages' outputs go through it, and only what reads texts by their paths runs on this node alone.

    Returns:
        The data set's folder and its manifest; every file of it has its hash.

    Raises:
        UserError: `place` holds something else, or as `prepare`.
        WorkerDiedError: as `map_on_ray`.
    """
    work = work_of(store)
    map_items = map_on_ray if home is None else partial(map_on_ray, resources=Resources(here=True))
    if not place.is_symlink() and place.exists():
        if inputs is None:
            with wait_for_lock(store):
                inputs = resolve_inputs(data, tokenizer, files, work, map_items, report)
        manifest = read_if_intact(place, inputs.identity, map_items, report, full)
        if manifest is None:
            raise UserError(
                f"{place} is a folder instead of a link to the prepared data, and it is damaged or was not made from "
                "the present texts and settings; remove it to have it replaced by a link, or set name=… for a new run"
            )
        return place, manifest
    if inputs is not None:
        folder = store / inputs.identity[:16]
        manifest = read_if_intact(folder, inputs.identity, map_items, report, full)
        if manifest is not None:
            return folder, manifest
    with wait_for_lock(store):
        inputs = resolve_inputs(data, tokenizer, files, work, map_items, report)
        folder = store / inputs.identity[:16]
        if home is None:
            return folder, prepare(data, tokenizer, folder, map_items, report, work, inputs)
        with home.preparing(store) as location:
            manifest = read_if_intact(folder, inputs.identity, map_items, report) if home.fetch_data(folder) else None
            if manifest is None:
                stages = ObjectStoreStages(location, [store], map_on_ray, map_items)
                manifest = prepare(data, tokenizer, folder, map_items, report, work, inputs, stages)
                home.share_data(folder)
            return folder, manifest


def link(place: Path, folder: Path) -> None:
    """Make `place` a link to the data set in `folder`, unless it is that folder; replaces a link to another."""
    if place == folder:
        return
    target = os.path.relpath(folder, place.parent)
    if place.is_symlink() and os.readlink(place) != target:
        place.unlink()
    if not place.is_symlink():
        place.symlink_to(target)


def work_of(store: Path) -> Path:
    """Where the stages of all data sets in `store` keep their outputs."""
    return store / "work"
