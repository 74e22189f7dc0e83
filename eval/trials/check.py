"""Checks of a recipe's evaluation, before anything runs. Nothing in this file imports torch."""

from collections.abc import Sequence

from multihop.common.errors import UserError
from multihop.eval.config import SETTING_KINDS, EvalConfig, Features, TrialSettings, settings_of
from multihop.eval.finetune.document_context import check_documents
from multihop.eval.metrics import bleu
from multihop.eval.tasks.known_tasks import HELDOUT, TASK_NAMES, TaskSource, has_task_file
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES


def check_tasks(config: EvalConfig, tasks: Sequence[TaskSource], family: str) -> None:
    """Refuse tasks that cannot be run, reading the examples of tasks of pairs alone.

    Args:
        tasks: what `open_tasks` returned.
        family: family of the model that is evaluated.

    Raises:
        UserError: two tasks have one name, a package that one needs is missing, its pairs cannot be read, or it does
            not suit the model.
    """
    names: set[str] = set()
    declared = FAMILIES[family]
    for name, task in zip((each.name for each in config.tasks), tasks, strict=True):
        if task.name in names or (has_task_file(name) and task.name in TASK_NAMES):
            raise UserError(
                f"{name} in eval.tasks describes a task named {task.name}, and so does another one; rename the file"
            )
        names.add(task.name)
        if task.is_translation != declared.translates:
            kind, can = ("a translation", "cannot") if task.is_translation else ("no translation", "can only")
            raise UserError(
                f"task {name} is {kind}, but model.family={family} {can} translate; remove the task from eval.tasks"
            )
        if task.is_completion and "completion" not in declared.objectives:
            completing = " or ".join(known for known, other in FAMILIES.items() if "completion" in other.objectives)
            raise UserError(
                f"task {name} needs a model that completes sources (model.family={completing}), but "
                f"model.family={family}; remove the task from eval.tasks"
            )
        if task.needs_bleu:
            bleu.check_installed()
            _ = task.task  # refuses pairs that cannot be read
        if name == HELDOUT and config.checkpoint is not None:
            raise UserError(
                f"task {HELDOUT} reads the held-out text of a run, but eval.checkpoint is a Hugging Face model; "
                "remove the task from eval.tasks"
            )
        if not task.is_trained and not (declared.causal or declared.translates or declared.predicts_masks):
            raise UserError(
                f"task {name} scores texts by a causal or a masked model, but model.family={family} predicts each "
                "token from one side at a time, and is for fine-tuning and features; remove the task from eval.tasks"
            )
        if task.needs_causal and not declared.causal:
            causal = " or ".join(known for known, other in FAMILIES.items() if other.causal)
            raise UserError(
                f"task {name} needs a causal model (model.family={causal}), but model.family={family}; "
                "remove the task from eval.tasks"
            )


def check_start_from(config: EvalConfig, tasks: Sequence[TaskSource]) -> None:
    """Refuse tasks that cannot start from the task that they name.

    Raises:
        UserError: the other task is not in the recipe, is the same or starts from another one, or one of them trains
            nothing.
    """
    sections = {section.name: section for section in config.tasks}
    is_trained = {section.name: task.is_trained for section, task in zip(config.tasks, tasks, strict=True)}
    for name, source in ((each.name, each.start_from) for each in config.tasks if each.start_from is not None):
        setting = f"start_from={source} of task {name} in eval.tasks"
        if source == name:
            raise UserError(f"{setting} is the task itself; name another task, or remove start_from")
        if source not in sections:
            others = ", ".join(other for other in sections if other != name) or "none"
            raise UserError(f"{setting} is not one of the other tasks ({others}); add {source} to eval.tasks")
        if further := sections[source].start_from:
            raise UserError(
                f"{setting} starts from {further} itself, but only one step is supported; remove start_from of one"
            )
        for frozen in (each for each in (name, source) if sections[each].features or config.features):
            raise UserError(
                f"{setting}: {frozen} has features, with which no weights are fine-tuned; remove one of them"
            )
        for untrained in (each for each in (name, source) if not is_trained[each]):
            raise UserError(f"{setting}: {untrained} trains nothing; remove start_from")


def check_average(config: EvalConfig, tasks: Sequence[TaskSource], other: ModelConfig) -> None:
    """Refuse tasks whose predictions cannot be averaged with those of another model, and settings that are impossible
    for it.

    Args:
        other: the model of `average_with`.

    Raises:
        UserError: a task predicts no classes, a task starts from another one, or the other model cannot be fine-tuned
            with the settings.
    """
    setting = f"eval.average_with={config.average_with}"
    if FAMILIES[other.family].translates:
        raise UserError(f"{setting} is a model of family {other.family}, which translates; set another one, or null")
    for section, source in zip(config.tasks, tasks, strict=True):
        if section.start_from is not None:
            raise UserError(
                f"{setting}: task {section.name} starts from the weights of {section.start_from}, which are those of "
                "one model; remove start_from, or set eval.average_with=null"
            )
        kind = source.task.kind if source.is_trained else "zero-shot"
        if kind not in ("classification", "choice"):
            raise UserError(
                f"{setting} averages the probabilities of classes or choices, but task {section.name} is of kind "
                f"{kind}; remove the task, or set eval.average_with=null"
            )
    check_settings(config, tasks, other)


def check_settings(config: EvalConfig, tasks: Sequence[TaskSource], model: ModelConfig) -> None:
    """Refuse features that the model lacks or a task cannot use, impossible settings by layer, and document context
    where there are no documents.

    Only tasks with document context or a CRF are read. Set for all tasks, document context is for those of tagging.

    Args:
        model: the model that is evaluated.

    Raises:
        UserError: one of the settings is impossible, or a task's files are missing or damaged.
    """
    for section in (config, *config.tasks):
        if section.features is not None:
            _check_features(section.features, model)
    for section, source in zip(config.tasks, tasks, strict=True):
        for settings in settings_of(config, section) if source.is_trained else ():
            _check_layerwise(section.name, settings, model)
        features = (section.features or config.features) if source.is_trained else None
        if features is not None and features.head == "bilstm_crf" and (kind := source.task.kind) != "tagging":
            raise UserError(
                f"features.head=bilstm_crf is for tagging, but task {source.task.name} is of kind {kind}; set the "
                "features of each task, with head=bilstm for this one"
            )
        pooling = section.pooling if section.pooling is not None else config.pooling
        ignored = features is not None and pooling not in ("family", "mean")
        if ignored and source.task.kind in SETTING_KINDS["pooling"]:
            raise UserError(
                f"pooling of task {source.task.name} is for fine-tuning, and with features a text is the mean of its "
                "tokens' states; remove pooling or features"
            )
        of_task = section.document_context
        if of_task if of_task is not None else config.document_context:
            task = source.task
            if task.kind == "tagging":
                check_documents(task)
            elif of_task:
                raise UserError(
                    f"document_context=true is for tagging, but task {task.name} is of kind {task.kind}; remove the key"
                )


def _check_features(features: Features, model: ModelConfig) -> None:
    widths = {model.state_widths[index] for index in features.indexes(model.layers)}
    if features.combine not in ("concat", "taglm") and len(widths) > 1:
        raise UserError(
            f"combine={features.combine} adds states, but features.layers={features.layers} have widths "
            f"{' and '.join(map(str, sorted(widths)))}; set layers of one width, or features.combine=concat"
        )


def _check_layerwise(task: str, settings: TrialSettings, model: ModelConfig) -> None:
    """Refuse settings of the schedule, the rates and the freezing of layers that cannot be followed."""
    if settings.dropout is not None:
        model.with_dropout(settings.dropout)
    if settings.schedule == "slanted_triangular" and not settings.warmup_ratio:
        raise UserError(
            f"schedule=slanted_triangular of task {task} grows over warmup_ratio=0.0 of the steps; set warmup_ratio "
            "between 0 and 1, such as 0.1"
        )
    layerwise = {"layer_lr_decay": settings.layer_lr_decay != 1, "gradual_unfreezing": settings.gradual_unfreezing}
    for key in (key for key, is_set in layerwise.items() if is_set and settings.features is not None):
        raise UserError(f"{key} of task {task} trains layers that its features freeze; remove {key} or features")
    if settings.gradual_unfreezing and settings.epochs < model.num_layer_groups:
        raise UserError(
            f"gradual_unfreezing=true of task {task} unfreezes one of the model's {model.num_layer_groups} groups of "
            f"layers (embeddings, blocks, head) an epoch, but epochs={settings.epochs:g}; set at least "
            f"epochs={model.num_layer_groups}"
        )
