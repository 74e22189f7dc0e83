"""Refuses launches that would silently retrain a run whose checkpoints are missing, resume after the last step, or
ignore keys that set initial values of imported weights."""

from collections.abc import Collection
from pathlib import Path

from multihop.common.errors import UserError
from multihop.common.json_lines import read_rows
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.owner import read_owner
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.phases import total_steps
from multihop.pretrain.models.config import ModelConfig

_STEP = "step-"


def check_checkpoints_exist(run_dir: Path, checkpoints: str) -> None:
    """Refuse to restart a run at step 0 if its checkpoints are missing, for example because a volume is not mounted.

    Every launch claims the location before its first row of metrics, and a launch that resumes records its step in
    launches.jsonl. A run that was killed before its first checkpoint has claimed the location, and may restart.

    Raises:
        UserError: The location has no checkpoints, but the run's records show that it had some.
    """
    if any(name.startswith(_STEP) for name in open_folder(checkpoints).names()):
        return
    rows, launches = run_dir / "metrics.jsonl", run_dir / "launches.jsonl"
    reached = max((row.get("step", 0) for row in read_rows(rows)), default=None)
    resumed = max((row.get("step", 0) for row in read_rows(launches)), default=0)
    if resumed == 0 and (reached is None or read_owner(checkpoints) is not None):
        return
    known = f"{rows.name} has rows up to step {reached}" if reached is not None else "it was trained before"
    known += f", and {launches.name} has a launch from the checkpoint of step {resumed}" if resumed else ""
    raise UserError(
        f"{checkpoints} holds no checkpoints of {run_dir}, but {known}; mount the volume or restore the checkpoints, "
        f"or, to train from step 0 again, set name=… for a new run or remove {rows.name} and {launches.name}"
    )


def check_steps_left(run_dir: Path, config: TrainingConfig, step: int) -> None:
    """Refuse phases that end before the newest checkpoint.

    Args:
        step: The step of the newest checkpoint.

    Raises:
        UserError: The phases have fewer steps.
    """
    last = total_steps(config.phases)
    if step > last:
        raise UserError(
            f"{run_dir} is trained to step {step}, and its phases now have {last} steps; raise phases[].steps to "
            f"{step} or more in total, or set name=… for a new run"
        )


def check_init_keys(model: ModelConfig, missing: Collection[str] = ()) -> None:
    """Refuse keys that set initial values of weights that `model.init_from` provides: they would be ignored.

    Args:
        missing: The parameters that the model at `init_from` does not have.

    Raises:
        UserError: Such a key is set.
    """
    for key, default, parameter in (("output_bias", "zeros", "word_bias"), ("word_init", "random", "word.weight")):
        if model.init_from is not None and getattr(model, key, default) != default and parameter not in missing:
            raise UserError(
                f"model.{key}={getattr(model, key)} initializes new weights, but model.init_from="
                f"{model.init_from} provides them; set model.{key}={default}, or remove init_from"
            )
