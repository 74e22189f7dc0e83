"""Which model a run's trials and examples are of, and which there are."""

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.runs.recipe import Recipe
from cluster.runs.resolved import ResolvedRun
from data_prep.tokenizers.existing import adopt
from data_prep.tokenizers.special_tokens import TRAINED
from data_prep.tokenizers.tokenizer import describe, parse
from eval.check_settings import check_settings
from eval.evaluated import Evaluated, of_huggingface, of_run, open_tokenizer
from eval.inference.examples import Examples, check_examples, read_examples
from eval.known_tasks import check_tasks
from eval.start_from import check_starts
from pretrain.checkpoint.manifest import folder_of_step
from pretrain.models.config import ModelConfig

if TYPE_CHECKING:
    from eval.trial import Trial


def check_evaluation(recipe: Recipe) -> None:
    """Refuse tasks, settings and examples that cannot be run, reading the examples of translation and of document
    context alone.

    Raises:
        ValueError: as `check_tasks`, `check_starts`, `check_settings` and `check_examples`.
    """
    model = _evaluated_model(recipe)
    check_tasks(recipe.eval, model.family)
    check_starts(recipe.eval)
    check_settings(recipe.eval, model.layers)
    if recipe.eval.examples:
        check_examples(recipe.eval.examples, model.family, _mask_token(recipe))


def planned_trials(run: ResolvedRun) -> "list[Trial]":
    """All trials of the Hugging Face model that the recipe names, or of `run.checkpoint`."""
    from cluster.runs.trials import weights_dir
    from eval.plan import plan_trials

    return plan_trials(run.recipe.eval, _evaluated(run), weights_dir(run.results))


def left_examples(run: ResolvedRun) -> Examples | None:
    """The examples of the same model, if they are not made; None: they are, or the recipe has none."""
    recipe = run.recipe
    if not recipe.eval.examples:
        return None
    parent = recipe.model.init_from if recipe.eval.checkpoint is None else None
    examples = Examples(recipe.eval.examples, _evaluated(run), parent, recipe.seed, recipe.eval.cpus)
    made = read_examples(run.results.parent)
    return None if made is not None and made.get("key") == examples.key else examples


def _evaluated(run: ResolvedRun) -> Evaluated:
    recipe, saved = run.recipe, run.checkpoint
    if recipe.eval.checkpoint is not None:
        return of_huggingface(Path(recipe.eval.checkpoint))
    assert saved is not None and run.data is not None
    location = folder_of_step(run.checkpoints, saved.step)
    data = run.data_folder.absolute()
    return of_run(recipe.model, location, saved.content_hash(), saved.step, data, run.data)


def _evaluated_model(recipe: Recipe) -> ModelConfig:
    return recipe.model if recipe.eval.checkpoint is None else of_huggingface(Path(recipe.eval.checkpoint)).model


def _mask_token(recipe: Recipe) -> str | None:
    """As the evaluated model's tokenizer spells it, which may not have been trained yet; None: it has none."""
    if recipe.eval.checkpoint is not None:
        tokenizer, info = open_tokenizer(of_huggingface(Path(recipe.eval.checkpoint)).tokenizer_path)
    elif recipe.tokenizer.path is not None:
        content = adopt(recipe.tokenizer.path, recipe.tokenizer.lowercase)
        tokenizer, info = parse(content), describe(content, "")
    else:
        return TRAINED[recipe.tokenizer.special_tokens].get("mask")
    return tokenizer.id_to_token(info.special_ids["mask"]) if "mask" in info.special_ids else None
