"""What a start must not do without a word: begin anew where checkpoints are missing, go on behind the last step, or
ignore first values for weights that it takes from elsewhere."""

from collections.abc import Collection
from pathlib import Path

from common.json_lines import read_rows
from common.storage import open_folder
from pretrain.checkpoint.owner import read_owner
from pretrain.config import TrainingConfig
from pretrain.data.phases import total_steps
from pretrain.models.config import ModelConfig

_STEP = "step-"


def check_checkpoints_exist(run_dir: Path, checkpoints: str) -> None:
    """Refuse to begin at step 0 a run whose checkpoints are gone, such as those on a volume that is not mounted.

    Every start claims the location before its first row of metrics, and a start that resumed names its step in
    starts.jsonl. A run that was killed before its first commit has claimed the location, and may begin again.

    Raises:
        ValueError: the location is empty, and the rows say that it was not.
    """
    if any(name.startswith(_STEP) for name in open_folder(checkpoints).names()):
        return
    rows, starts = run_dir / "metrics.jsonl", run_dir / "starts.jsonl"
    reached = max((row.get("step", 0) for row in read_rows(rows)), default=None)
    resumed = max((row.get("step", 0) for row in read_rows(starts)), default=0)
    if resumed == 0 and (reached is None or read_owner(checkpoints) is not None):
        return
    known = f"{rows.name} has its steps up to {reached}" if reached is not None else "it was trained before"
    known += f", and {starts.name} a start from the checkpoint of step {resumed}" if resumed else ""
    raise ValueError(
        f"{checkpoints} holds no checkpoints of {run_dir}, but {known}; mount the volume or restore the checkpoints, "
        f"or, to train from step 0 again, set name=… for a new run or remove {rows.name} and {starts.name}"
    )


def check_steps_left(run_dir: Path, config: TrainingConfig, step: int) -> None:
    """Refuse phases that end before the newest checkpoint.

    Args:
        step: of the newest checkpoint.

    Raises:
        ValueError: they do.
    """
    last = total_steps(config.phases)
    if step > last:
        raise ValueError(
            f"{run_dir} is trained to step {step}, and its phases now have {last} steps; raise phases[].steps to "
            f"{step} or more in all, or set name=… for a new run"
        )


def check_init_keys(model: ModelConfig, lacking: Collection[str] = ()) -> None:
    """Refuse first values for weights that `model.init_from` has, where they would be ignored.

    Args:
        lacking: the parameters that it does not have.

    Raises:
        ValueError: naming the key.
    """
    for key, default, parameter in (("output_bias", "zeros", "word_bias"), ("word_init", "random", "word.weight")):
        if model.init_from is not None and getattr(model, key) != default and parameter not in lacking:
            raise ValueError(
                f"model.{key}={getattr(model, key)} is for weights that begin at random, and model.init_from="
                f"{model.init_from} has these weights; set model.{key}={default}, or remove init_from"
            )
