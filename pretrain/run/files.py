"""Files of a run directory."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from multihop.common.config import key_path, mistakes_in
from multihop.common.errors import UserError
from multihop.common.files import read_json_object
from multihop.pretrain.config import TrainingConfig

GAVE_UP = "gave-up.json"
"""File that says why a restart would fail too: {"code": the exit code, "message": one sentence}."""

STOP_FILE = "stop"
"""File that asks the ranks to save and exit."""
RESTART_FILE = "restart"
"""File that the driver writes to restart the ranks once they have saved and exited."""

ROWS = ("metrics.jsonl", "launches.jsonl", "skipped.jsonl")
"""Files that rank 0 appends rows to."""
AUDITS = "audits.jsonl"
"""File with a row for each audit of a checkpoint."""
AUDITS_GIVEN_UP = "audits-given-up.jsonl"
"""File with a row for each audit that checkpoint.audit asked for and that could not be made."""
PLANS = "plans.jsonl"
"""File with a row for each start on GPUs: the plan of the rest of the training, or why there is none."""
STATE_CHECKSUMS = "state_checksums"
"""Key of a row of metrics.jsonl with a checksum of each parameter's weights and moments after a step."""
JOURNAL = "journal"
"""Folder with these rows, for a run in an object store."""


def read_config(run_dir: Path) -> TrainingConfig:
    """The part of RUN_DIR/recipe.json that training reads.

    Raises:
        UserError: It is missing or not a resolved recipe.
    """
    path = run_dir / "recipe.json"
    try:
        recipe = read_json_object(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; `multihop train RECIPE` writes it") from None
    return config_of(recipe, str(path))


def config_of(recipe: dict[str, Any], path: str) -> TrainingConfig:
    """The part of a run's recipe that training reads.

    Args:
        path: The file that it was read from, for messages.

    Raises:
        UserError: It is not a resolved recipe.
    """
    try:
        return TrainingConfig.model_validate({key: recipe[key] for key in TrainingConfig.model_fields if key in recipe})
    except ValidationError as error:
        mistakes = [
            f"{key_path(each['loc'])}: {each['msg'].removeprefix('Value error, ')}" for each in mistakes_in(error)
        ]
        raise UserError(f"{path}: {'; '.join(mistakes)}; correct the recipe") from None


def checkpoints_of(run_dir: Path, config: TrainingConfig) -> str:
    """The location of the run's checkpoints: an absolute path or s3://BUCKET/PREFIX."""
    location = config.checkpoint.location
    return f"{location.rstrip('/')}/{config.name}" if location else str(run_dir.absolute() / "checkpoints")
