"""A smoke test of a recipe on its own data: a step, a checkpoint, and another step after a restart from it.

The run has a random name, and is removed afterwards.
"""

import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from multihop.cluster.ray import TrainingFailed, WorkerDiedError
from multihop.cluster.runs.prepared import work_of
from multihop.cluster.runs.recipe import Recipe, validate_recipe
from multihop.cluster.runs.resolved import store_of
from multihop.cluster.runs.stages import run_stages
from multihop.common.errors import DONE, UserError
from multihop.common.storage import Folder, open_folder
from multihop.data_prep.pipeline.identity import resolve_known_inputs
from multihop.data_prep.reading.sources import list_files
from multihop.pretrain.run.files import checkpoints_of


def smoke_test(recipe: Recipe, runs: Path) -> dict[str, Any]:
    """Train a step with all ranks, save, load and train another.

    Args:
        runs: folder of all runs. Data that is prepared in it for the recipe is used; nothing is prepared.

    Returns:
        first_s and second_s (seconds of each start), {skipped: reason} if the data is not prepared, or
        {error: reason}, for example if a source is missing.
    """
    try:
        if not _is_prepared(recipe, runs):
            return {"skipped": "the data is not prepared yet (--stage prep)"}
    except (UserError, OSError) as error:
        return {"error": str(error)}
    name = f"doctor-{secrets.token_hex(6)}"
    checkpoints = checkpoints_of(runs / name, recipe.model_copy(update={"name": name}))
    try:
        return {"first_s": _train(recipe, runs, name, 1), "second_s": _train(recipe, runs, name, 2)}
    except (UserError, OSError, TrainingFailed, WorkerDiedError) as error:
        return {"error": str(error)}
    finally:
        _remove(open_folder(checkpoints))
        if (runs / name).exists():
            shutil.rmtree(runs / name)


def shorten(recipe: Recipe, runs: Path, name: str, steps: int) -> Recipe:
    """Return the recipe with its first phase only, and so many steps of that at the full batch size."""
    content = recipe.model_dump(mode="json")
    phase = content["phases"][0] | {"steps": steps, "batch_ramp": [], "skip_steps": [], "schedule": "constant"}
    content["phases"] = [phase | {"warmup_ratio": None, "warmup_steps": 0}]
    content["checkpoint"] |= {"save_interval": 1}
    content["tracking"]["uri"] = f"sqlite:///{(runs / name).absolute() / 'mlflow.db'}"  # not among the runs of others
    content["cluster"]["address"] = None  # the cluster of this process
    return validate_recipe(content | {"name": name}, "the shortened recipe")


def _train(recipe: Recipe, runs: Path, name: str, steps: int) -> float:
    started = time.monotonic()
    code = run_stages(shorten(recipe, runs, name, steps), runs, ("prep", "train"), allowed=["phases"])
    if code != DONE:
        raise TrainingFailed(f"a run of {steps} steps ended with exit code {code}")
    return time.monotonic() - started


def _is_prepared(recipe: Recipe, runs: Path) -> bool:
    store = store_of(recipe, runs)
    inputs = resolve_known_inputs(recipe.data, recipe.tokenizer, list_files(recipe.data.sources), work_of(store))
    return inputs is not None and (store / inputs.identity[:16] / "manifest.json").exists()


def _remove(folder: Folder) -> None:
    for name, kind in folder.entries().items():
        if kind == "folder":
            _remove(folder.child(name))
        else:
            folder.remove(name)
    folder.remove_if_empty()
