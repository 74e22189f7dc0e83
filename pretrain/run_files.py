"""What stands where in a run's folder."""

import json
from pathlib import Path

from pretrain.config import TrainingConfig

GAVE_UP = "gave-up.json"
"""Why no rank should be started again as things are: {"code": the exit code, "message": one sentence}."""


def read_config(run_dir: Path) -> TrainingConfig:
    """The part of RUN_DIR/recipe.json that training reads.

    Raises:
        ValueError: there is none, or it is not a resolved recipe.
    """
    path = run_dir / "recipe.json"
    try:
        recipe = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; `multihop train RECIPE` writes it") from None
    return TrainingConfig.model_validate({key: recipe[key] for key in TrainingConfig.model_fields if key in recipe})


def checkpoints_of(run_dir: Path, config: TrainingConfig) -> str:
    """Where the run's checkpoints stand: an absolute path or s3://BUCKET/PREFIX."""
    location = config.checkpoint.location
    return f"{location.rstrip('/')}/{config.name}" if location else str(run_dir.absolute() / "checkpoints")
