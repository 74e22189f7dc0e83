"""Audits of a run in an object store: on this machine, in its copy of the run, with the run's data."""

from pathlib import Path

from multihop.cluster.remote.remote_run import RemoteRun, open_remote_run
from multihop.cluster.runs.audit import Audit, audit, steps_to_replay
from multihop.cluster.runs.prepared import link_dataset
from multihop.common.errors import UserError
from multihop.common.files import json_object, write_atomically
from multihop.common.mirror import fetch
from multihop.common.storage import open_folder
from multihop.data_prep.dataset.manifest import MANIFEST
from multihop.data_prep.pipeline.identity import sources_key
from multihop.pretrain.checkpoint.manifest import folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.owner import IDENTITY
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.run.files import checkpoints_of, read_config


def audit_in_store(location: str, first: int | None, last: int | None, bisect: bool = False) -> Audit:
    """Audit a run at s3://BUCKET/PREFIX/NAME, as `audit`. No other process may work on the run meanwhile.

    Raises:
        InUseError: another process works on the run.
        UserError: there is no such run, its data is gone, or as `audit`.
        TrainingFailed, KeyboardInterrupt: as `audit`.
    """
    runs, _, name = location.rstrip("/").rpartition("/")
    store = open_folder(location)
    if store.size("recipe.json") is None:
        raise UserError(f"{location} is not a run, because it has no recipe.json; give s3://BUCKET/PREFIX/NAME")
    with open_remote_run(runs, name) as remote:
        assert remote is not None, "the location is in a store"
        config = read_config(remote.folder)
        checkpoints = checkpoints_of(remote.folder, config)
        first, last = steps_to_replay(checkpoints, first, last)
        fingerprint = read_checkpoint_manifest(folder_of_step(checkpoints, last)).data_fingerprint
        link_dataset(remote.folder / "data", _fetch_data(remote, config, fingerprint))
        fetch(store.child("index"), remote.folder / "index")
        write_atomically(remote.folder / IDENTITY, store.read_bytes(IDENTITY))
        return audit(remote.folder, first, last, None, bisect)


def _fetch_data(remote: RemoteRun, config: TrainingConfig, fingerprint: str) -> Path:
    """Fetch the data set with a fingerprint among those of the recipe's sources."""
    assert config.data is not None, "a run's recipe has its data"
    path = Path(".prepared") / sources_key(config.data)
    store = open_folder(f"{remote.location}/{path.as_posix()}")
    for name, kind in store.entries().items():
        folder = store.child(name)
        if kind != "folder" or folder.size(MANIFEST) is None:
            continue
        found = json_object(folder.read_bytes(MANIFEST, 2**30), f"{folder.location}/{MANIFEST}")
        if found.get("fingerprint") == fingerprint and remote.fetch_data(remote.runs / path / name):
            return remote.runs / path / name
    raise UserError(
        f"{store.location} has no data set with the fingerprint {fingerprint[:12]} of the checkpoint; prepare the "
        "run's texts again with `multihop prep`"
    )
