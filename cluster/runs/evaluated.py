"""Which model a run's trials are of, and which trials there are."""

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.runs.recipe import Recipe
from cluster.runs.resolved import ResolvedRun
from eval.check_settings import check_settings
from eval.known_tasks import check_tasks
from eval.start_from import check_starts
from pretrain.checkpoint.manifest import folder_of_step
from pretrain.models.config import ModelConfig

if TYPE_CHECKING:
    from eval.trial import Trial


def check_evaluation(recipe: Recipe) -> None:
    """Refuse tasks and settings that cannot be run, reading examples for document context alone.

    Raises:
        ValueError: as `check_tasks`, `check_starts` and `check_settings`.
    """
    model = _evaluated_model(recipe)
    check_tasks(recipe.eval, model.family)
    check_starts(recipe.eval)
    check_settings(recipe.eval, model.layers)


def planned_trials(run: ResolvedRun) -> "list[Trial]":
    """All trials of the Hugging Face model that the recipe names, or of `run.checkpoint`."""
    from cluster.runs.trials import weights_dir
    from eval.evaluated import of_huggingface, of_run
    from eval.plan import plan_trials

    recipe, saved = run.recipe, run.checkpoint
    if recipe.eval.checkpoint is not None:
        evaluated = of_huggingface(Path(recipe.eval.checkpoint))
    else:
        assert saved is not None and run.data is not None
        location = folder_of_step(run.checkpoints, saved.step)
        data = run.data_folder.absolute()
        evaluated = of_run(recipe.model, location, saved.content_hash(), saved.step, data, run.data)
    return plan_trials(recipe.eval, evaluated, weights_dir(run.results))


def _evaluated_model(recipe: Recipe) -> ModelConfig:
    if recipe.eval.checkpoint is None:
        return recipe.model
    from eval.evaluated import of_huggingface

    return of_huggingface(Path(recipe.eval.checkpoint)).model
