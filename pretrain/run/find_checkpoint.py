"""Finds the checkpoint at a path that a user gives, with its model and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from multihop.common.errors import UserError
from multihop.common.files import MAX_JSON_BYTES, json_object, sha256_file
from multihop.common.storage import open_folder
from multihop.data_prep.dataset.manifest import Manifest, read_data_manifest
from multihop.pretrain.checkpoint.manifest import MANIFEST, CheckpointManifest, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import list_steps, newest_good
from multihop.pretrain.config import PhaseConfig
from multihop.pretrain.data.phases import model_after
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import parse_model_config
from multihop.pretrain.run.changes import unreadable_recipe
from multihop.pretrain.run.files import checkpoints_of, config_of, read_config


@dataclass(frozen=True)
class FoundCheckpoint:
    """A committed checkpoint with its model and its run's data."""

    location: str
    manifest: CheckpointManifest
    model: ModelConfig
    data: Manifest
    """The manifest of the run's data, which has the tokenizer, or two for pairs, whose files were verified."""
    data_folder: Path
    skipped: list[str]
    """Why newer checkpoints were skipped."""


def find_checkpoint(path: str, step: int | None = None) -> FoundCheckpoint:
    """Find the checkpoint at `path`, with the tokenizer of the run's data. Only the newest checkpoint is verified.

    Args:
        path: A run's directory, its checkpoints' directory, or the directory of one step.
        step: The checkpoint's step; None: the newest good one.

    Raises:
        UserError: There is no such checkpoint, or the run's data with its tokenizer is missing, as in a bucket.
    """
    if "://" in path:
        raise UserError(f"{path} has no tokenizer; give the run's directory, whose data has it")
    location, saved, skipped = locate_checkpoint(path, step)
    run_dir = run_dir_of(path)
    data = _data_of(run_dir, saved)
    return FoundCheckpoint(location, saved, _model_of(run_dir, saved), data, run_dir / "data", skipped)


def run_dir_of(path: str) -> Path:
    """The run's directory, which contains its recipe or its data: `path`, or a parent of it."""
    folder = Path(path).absolute()
    places = (folder, *folder.parents[:2])
    return next((each for each in places if (each / "recipe.json").is_file() or (each / "data").exists()), folder)


def checkpoints_at(path: str) -> str:
    """The location of the checkpoints, given a run's directory, its place in an object store or the location itself.

    Raises:
        UserError: There are none.
    """
    location = path.rstrip("/")
    if "://" in location:
        location = _checkpoints_of_run_in_store(location) or location
    elif (Path(path) / "recipe.json").is_file():
        location = checkpoints_of(Path(path), read_config(Path(path)))
    if not list_steps(location):
        raise UserError(
            f"{location} holds no checkpoints; give a run's directory, the directory that its step-… directories are "
            "in, or s3://BUCKET/PREFIX of either"
        )
    return location


def _checkpoints_of_run_in_store(location: str) -> str | None:
    """The location of the checkpoints of a run at s3://BUCKET/PREFIX/NAME; None if there is no run."""
    folder = open_folder(location)
    if folder.size("recipe.json") is None:
        return None
    path = f"{location}/recipe.json"
    config = config_of(json_object(folder.read_bytes("recipe.json", MAX_JSON_BYTES + 1), path), path)
    # A run that was copied to the store has its checkpoints with it.
    return checkpoints_of(Path(), config) if config.checkpoint.location else f"{location}/checkpoints"


def locate_checkpoint(path: str, step: int | None = None) -> tuple[str, CheckpointManifest, list[str]]:
    """The location of the checkpoint at `path`, its manifest, and why newer ones were skipped; see `find_checkpoint`.

    Raises:
        UserError: There is no such checkpoint.
    """
    location = path.rstrip("/")
    if (Path(location) / MANIFEST).is_file():
        if step is not None:
            raise UserError(f"{path} is a single checkpoint, but --step {step} chooses among several; omit --step")
        return location, read_checkpoint_manifest(location), []
    checkpoints = checkpoints_at(path)
    if step is not None:
        chosen = folder_of_step(checkpoints, step)
        return chosen, read_checkpoint_manifest(chosen), []
    saved, skipped = newest_good(checkpoints)
    if saved is None:
        raise UserError(f"{checkpoints} has no intact checkpoint: {'; '.join(skipped)}")
    return folder_of_step(checkpoints, saved.step), saved, skipped


def find_checkpoint_by_hash(path: str, content_hash: str) -> tuple[str, int] | None:
    """The location and step of the checkpoint at `path` with these weights; None if there is none.

    Args:
        path: A path as `find_checkpoint` takes it.
        content_hash: The result of `CheckpointManifest.content_hash`.

    Raises:
        UserError: There are no checkpoints at all.
    """
    location = path.rstrip("/")
    if open_folder(location).size(MANIFEST) is not None:
        locations = [location]
    else:
        checkpoints = checkpoints_at(path)
        locations = [folder_of_step(checkpoints, step) for step in reversed(list_steps(checkpoints))]
    for each in locations:
        try:
            manifest = read_checkpoint_manifest(each)
        except ValueError:  # a damaged checkpoint does not count
            continue
        if manifest.content_hash() == content_hash:
            return each, manifest.step
    return None


def _data_of(run_dir: Path, saved: CheckpointManifest) -> Manifest:
    if not (run_dir / "data").exists():
        raise UserError(
            f"{run_dir / 'data'} is missing, which has the tokenizer; give the run's directory with its data, or run "
            "`multihop prep RECIPE`"
        )
    data = read_data_manifest(run_dir / "data")
    path = run_dir / "data" / data.tokenizer.file
    for info in filter(None, (data.tokenizer, data.target_tokenizer)):
        path = run_dir / "data" / info.file
        if not path.exists() or sha256_file(path) != info.sha256:
            raise UserError(f"{path} is missing or damaged; run `multihop prep RECIPE` again")
    if saved.tokenizer_sha256 not in (None, data.tokenizers_sha256):
        raise UserError(
            f"the checkpoint was trained with a different tokenizer ({str(saved.tokenizer_sha256)[:12]}) than "
            f"{path} ({data.tokenizers_sha256[:12]}); restore the run's data"
        )
    return data


def _model_of(run_dir: Path, saved: CheckpointManifest) -> ModelConfig:
    model = recorded_model(saved)
    if model is None:
        config = read_config(run_dir)
        return model_after(config.model, config.phases, saved.step)
    return model


def recorded_model(saved: CheckpointManifest) -> ModelConfig | None:
    """The model that a checkpoint records, with the rotary base of its last phase; None: it records no recipe.

    Raises:
        UserError: It was recorded by a version with other keys.
    """
    if saved.recipe is None:
        return None
    try:
        model = parse_model_config(saved.recipe["model"])
        phases = [PhaseConfig.model_validate(phase) for phase in saved.recipe.get("phases", ())]
    except ValidationError as error:
        raise unreadable_recipe(error) from None
    return model_after(model, phases, saved.step) if phases else model
