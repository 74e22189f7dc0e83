"""What stands where in a run's folder."""

import secrets
from pathlib import Path

from pydantic import ValidationError

from data_prep.files import read_json_object, write_atomically
from pretrain.config import TrainingConfig
from pretrain.storage import open_folder

GAVE_UP = "gave-up.json"
"""Why no rank should be started again as things are: {"code": the exit code, "message": one sentence}."""

_OWNER = "owner"
"""Beside the checkpoints: which run's they are."""


def read_config(run_dir: Path) -> TrainingConfig:
    """The part of RUN_DIR/recipe.json that training reads.

    Raises:
        ValueError: there is none, or it is not a resolved recipe.
    """
    path = run_dir / "recipe.json"
    try:
        recipe = read_json_object(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; `multihop train RECIPE` writes it") from None
    try:
        return TrainingConfig.model_validate({key: recipe[key] for key in TrainingConfig.model_fields if key in recipe})
    except ValidationError as error:
        mistakes = [f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()]
        raise ValueError(f"{path}: {'; '.join(mistakes)}; correct the recipe") from None


def checkpoints_of(run_dir: Path, config: TrainingConfig) -> str:
    """Where the run's checkpoints stand: an absolute path or s3://BUCKET/PREFIX."""
    location = config.checkpoint.location
    return f"{location.rstrip('/')}/{config.name}" if location else str(run_dir.absolute() / "checkpoints")


def claim_checkpoints(run_dir: Path, location: str) -> None:
    """Make sure that the place of a run's checkpoints can be written to, and is no other run's.

    Raises:
        ValueError: it cannot, or it is.
    """
    identity = run_dir / "identity"
    if not identity.exists():
        write_atomically(identity, secrets.token_hex(16).encode())
    mine, folder = identity.read_bytes(), open_folder(location)
    try:
        owner = folder.read_bytes(_OWNER) if folder.size(_OWNER) is not None else None
        if owner is None:
            folder.write_atomically(_OWNER, mine)
    except OSError as error:
        raise ValueError(
            f"{location} cannot be written to ({error}); correct checkpoint.location or its permissions"
        ) from None
    if owner not in (None, mine):
        raise ValueError(
            f"{location} holds the checkpoints of another run; choose another name or checkpoint.location, or remove "
            f"its file {_OWNER} if that run is this one, moved"
        )
