"""The evaluation of a run: the model under test, its trials and its examples, and whether all are done."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from multihop.cluster.runs.recipe import Recipe
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.common.errors import UserError
from multihop.common.json_lines import read_rows
from multihop.data_prep.tokenizers.existing import import_tokenizer
from multihop.data_prep.tokenizers.special_tokens import SPECIAL_TOKENS
from multihop.data_prep.tokenizers.tokenizer import describe, parse
from multihop.eval.inference.examples import Examples, check_examples, read_examples
from multihop.eval.model.model_under_test import (
    ModelUnderTest,
    of_huggingface,
    of_parent,
    of_path,
    of_run,
    open_tokenizer,
)
from multihop.eval.tasks.known_tasks import TaskSource, open_tasks
from multihop.eval.trials.check import check_average, check_settings, check_start_from, check_tasks
from multihop.eval.trials.plan_file import make_plan, read_plan
from multihop.eval.trials.start_from import next_wave
from multihop.pretrain.checkpoint.manifest import folder_of_step
from multihop.pretrain.data.phases import model_after
from multihop.pretrain.models.config import ModelConfig

if TYPE_CHECKING:
    from multihop.eval.trials.trial import Trial


def check_evaluation(recipe: Recipe) -> list[TaskSource]:
    """Refuse tasks, settings and examples that cannot be run; reads only the examples of translation and of document
    context.

    Returns:
        The tasks of the recipe, from which its trials are planned.

    Raises:
        UserError: as `open_tasks`, `check_tasks`, `check_start_from`, `check_settings`, `check_output_layer` and
            `check_examples`.
    """
    model = _model_config(recipe)
    tasks = open_tasks(recipe.eval)
    check_tasks(recipe.eval, tasks, model.family)
    check_start_from(recipe.eval, tasks)
    if "parent" in recipe.eval.inits and (recipe.eval.checkpoint is not None or recipe.model.init_from is None):
        why = (
            "model.init_from is not set, so they are random"
            if recipe.model.init_from is None
            else "the training of eval.checkpoint is unknown"
        )
        raise UserError(f"eval.inits has parent, the initial weights of the training, but {why}; remove parent")
    check_settings(recipe.eval, tasks, model)
    if recipe.eval.average_with is not None:
        check_average(recipe.eval, tasks, _averaged(recipe.eval.average_with).model)
    published = recipe.eval.checkpoint or (recipe.model.init_from if "parent" in recipe.eval.inits else None)
    if published is not None and not all(task.is_trained for task in tasks):
        from multihop.eval.trials.run_zero_shot import check_output_layer

        check_output_layer(Path(published), tasks)
    if recipe.eval.examples:
        check_examples(recipe.eval.examples, model.family, _mask_token(recipe))
    return tasks


def list_trials(run: ResolvedRun, to_run: bool = True) -> "list[Trial]":
    """Return all trials of the Hugging Face model that the recipe names, or of `run.checkpoint`.

    Args:
        to_run: False if only the keys of the trials are needed: the parent's weights may then be missing.

    Raises:
        UserError: A task cannot be read, or weights are missing.
    """
    from multihop.eval.trials.list_trials import plan_trials

    evaluated, config = _model_under_test(run), run.recipe.eval
    needs_parent = "parent" in config.inits
    parent = _parent(run, evaluated, "remove parent from eval.inits", to_run) if needs_parent else None
    averaged = _averaged(config.average_with) if config.average_with is not None else None
    return plan_trials(config, run.tasks, evaluated, weights_dir(run.results), parent, averaged)


def select_examples(run: ResolvedRun, to_run: bool = True) -> Examples | None:
    """Return the examples of the same model; None if the recipe has none. For arguments and errors see
    `list_trials`."""
    recipe = run.recipe
    if not recipe.eval.examples:
        return None
    evaluated = _model_under_test(run)
    continues = recipe.eval.checkpoint is None and recipe.model.init_from is not None
    before = _parent(run, evaluated, "set eval.examples=[]", to_run) if continues else None
    return Examples(recipe.eval.examples, evaluated, before, recipe.seed, recipe.eval.cpus)


def weights_dir(results: Path) -> Path:
    """Return the folder of weights from which trials of other tasks start."""
    return results.absolute().parent / "weights"


def is_evaluation_done(run: ResolvedRun) -> bool:
    """Return whether the last evaluation had the plan that the recipe has now, and all of it is done."""
    trials, rows = list_trials(run, to_run=False), read_rows(run.results)
    examples = select_examples(run, to_run=False)
    plan = make_plan(trials, rows, run.recipe.eval, examples.key if examples else None)
    last_plan = read_plan(run.folder)
    if plan != last_plan and (last_plan or plan.trials or plan.examples):
        return False
    wave = next_wave(trials, rows)
    return not (wave.trials or wave.failed) and (
        examples is None or read_examples(run.results.parent, examples.key) is not None
    )


def _parent(run: ResolvedRun, evaluated: ModelUnderTest, otherwise: str, to_run: bool) -> ModelUnderTest:
    """Return the model with the run's initial weights.

    Args:
        otherwise: what the user can do instead of restoring missing weights, for the message.

    Raises:
        UserError: The weights are missing.
    """
    model, saved = run.recipe.model, run.checkpoint
    assert model.init_from is not None and saved is not None
    if saved.parent is not None and not to_run:
        before = replace(evaluated, model=model)
        return replace(before, checkpoint_dir=model.init_from, checkpoint_sha256=saved.parent, checkpoint_step=None)
    try:
        return of_parent(evaluated, model, saved.parent)
    except UserError as error:
        raise UserError(f"{error}, or {otherwise}") from None


def _averaged(path: str) -> ModelUnderTest:
    try:
        return of_path(path)
    except UserError as error:
        raise UserError(f"eval.average_with: {error}; train that run first, or set eval.average_with=null") from None


def _model_under_test(run: ResolvedRun) -> ModelUnderTest:
    recipe, saved = run.recipe, run.checkpoint
    if recipe.eval.checkpoint is not None:
        return of_huggingface(Path(recipe.eval.checkpoint))
    assert saved is not None and run.data is not None
    location = folder_of_step(run.checkpoints, saved.step)
    data = run.data_folder.absolute()
    model = model_after(recipe.model, recipe.phases, saved.step)
    return of_run(model, location, saved.content_hash(), saved.step, data, run.data)


def _model_config(recipe: Recipe) -> ModelConfig:
    return recipe.model if recipe.eval.checkpoint is None else of_huggingface(Path(recipe.eval.checkpoint)).model


def _mask_token(recipe: Recipe) -> str | None:
    """Return the mask token of the model under test, whose tokenizer may not be trained yet; None if it has no mask
    token."""
    if recipe.eval.checkpoint is not None:
        tokenizer, info = open_tokenizer(of_huggingface(Path(recipe.eval.checkpoint)).tokenizer_path)
    elif recipe.tokenizer.path is not None:
        content = import_tokenizer(recipe.tokenizer.path, recipe.tokenizer.lowercase)
        tokenizer, info = parse(content), describe(content, "")
    else:
        return SPECIAL_TOKENS[recipe.tokenizer.special_tokens].get("mask")
    return tokenizer.id_to_token(info.special_ids["mask"]) if "mask" in info.special_ids else None
