"""The state of a run when a command starts: determined once, as an immutable value that is passed to the stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from multihop.cluster.console import console
from multihop.cluster.remote.node_cache import RemoteRunSpec
from multihop.cluster.remote.remote_run import RemoteRun
from multihop.cluster.runs.folder import note_change
from multihop.cluster.runs.prepared import work_of
from multihop.cluster.runs.recipe import Recipe
from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.dataset.verify import read_if_verified
from multihop.data_prep.pipeline.identity import ResolvedInputs, resolve_known_inputs, sources_key
from multihop.data_prep.reading.sources import InputFile, list_files
from multihop.eval.tasks.known_tasks import TaskSource
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import list_steps, verify
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.run.files import checkpoints_of


@dataclass(frozen=True)
class ResolvedRun:
    """The state of a run; a stage that changes it returns another one."""

    recipe: Recipe
    folder: Path
    store: Path
    """The data sets of the recipe's sources, shared by all runs."""
    files: Sequence[InputFile]
    """The recipe's input files, listed once."""
    inputs: ResolvedInputs | None
    """Hashes that identify the data set; None if files must be hashed first."""
    data: Manifest | None
    """The run's data set, if it is made of the input as it is now and unchanged since it was verified."""
    checkpoint: CheckpointManifest | None
    """The newest committed checkpoint. That of the last step is verified; others are, by the ranks that resume."""
    tasks: Sequence[TaskSource] = ()
    """The tasks of the recipe; none if it is not evaluated."""
    remote: RemoteRun | None = None
    """The run in an object store, of which `folder` is this node's copy; None: `folder` is the run itself."""

    @property
    def checkpoints(self) -> str:
        """Location of the run's checkpoints."""
        return checkpoints_of(self.folder, self.recipe)

    @property
    def data_folder(self) -> Path:
        """The run's data set, or a link to it."""
        return self.folder / "data"

    @property
    def results(self) -> Path:
        """The rows of the trials."""
        return self.folder / "eval" / "results.jsonl"

    @property
    def step(self) -> int:
        """Steps that the newest checkpoint has done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    def remote_spec(self) -> RemoteRunSpec | None:
        """Upload the data set, and return what the nodes are sent to find the run; None if the run is in a folder."""
        streams = self.recipe.data.shuffle_window_shards is not None
        return None if self.remote is None else self.remote.upload_data(self.data_folder, streams)

    @property
    def is_trained(self) -> bool:
        """Whether the checkpoint of the last step exists."""
        return self.step == total_steps(self.recipe.phases)


def resolve(
    recipe: Recipe,
    folder: Path,
    store: Path,
    full: bool,
    tasks: Sequence[TaskSource] = (),
    remote: RemoteRun | None = None,
) -> ResolvedRun:
    """List the inputs, find the data set and the newest checkpoint.

    Args:
        full: trust no file of the data set by its size and modification time, so that preparation verifies it.
        tasks: what `open_tasks` returned, if the run is evaluated.

    Raises:
        UserError: a source is missing.
    """
    files = list_files(recipe.data.sources)
    inputs = resolve_known_inputs(recipe.data, recipe.tokenizer, files, work_of(store))
    data = None
    if inputs is not None and not full and (folder / "data").exists():
        data = read_if_verified(folder / "data", inputs.identity)
    return with_newest_checkpoint(ResolvedRun(recipe, folder, store, files, inputs, data, None, tasks, remote))


def store_of(recipe: Recipe, runs: Path) -> Path:
    """Return the folder of all data sets of the recipe's sources."""
    return runs / ".prepared" / sources_key(recipe.data)


def with_newest_checkpoint(run: ResolvedRun) -> ResolvedRun:
    """Return the run with its newest committed checkpoint. A damaged checkpoint of the last step is ignored."""
    for step in reversed(list_steps(run.checkpoints)):
        is_last, location = step == total_steps(run.recipe.phases), folder_of_step(run.checkpoints, step)
        try:
            return replace(run, checkpoint=verify(location) if is_last else read_checkpoint_manifest(location))
        except UserError as error:
            if is_last:
                console.print(f"{error}; the steps since the last good checkpoint are trained again")
    return replace(run, checkpoint=None)


def check_data_unchanged(run: ResolvedRun, data: Manifest, allowed: Sequence[str]) -> None:
    """Refuse to resume with other data than the newest checkpoint was trained on, unless that is allowed.

    Raises:
        UserError: the data changed; the message says how, and what to do.
    """
    saved = run.checkpoint
    if saved is None or saved.data_fingerprint == data.fingerprint:
        return
    if saved.tokenizer_sha256 not in (None, data.tokenizers_sha256):
        raise UserError(
            f"the texts of {run.folder} changed, and with them the tokenizer that is trained on them: the model was "
            "trained with a different tokenizer; restore the texts, or set name=… for a new run"
        )
    if "data" in allowed:
        note_change(run.folder, "data", [("data", saved.data_fingerprint, data.fingerprint)])
        return
    raise UserError(
        f"the texts of {run.folder} changed: it was trained on data {saved.data_fingerprint[:12]}, and data.sources "
        f"now give {data.fingerprint[:12]}; restore the texts, set name=… for a new run, or, to resume with the new "
        "texts, add --allow-change data"
    )
