"""What a recipe's evaluation cannot do, refused before anything runs. Nothing in this file imports torch."""

from pathlib import Path

from multihop.common.errors import UserError
from multihop.eval.config import EvalConfig
from multihop.eval.finetune.document_context import check_documents
from multihop.eval.metrics import bleu
from multihop.eval.tasks import labelled_file
from multihop.eval.tasks.known_tasks import (
    HELDOUT,
    TASK_NAMES,
    find_task,
    is_own,
    is_zero_shot,
    load_task,
    located,
    shown_name,
)
from multihop.eval.tasks.zero_shot_sets import ZERO_SHOT_SETS
from multihop.pretrain.models.families import FAMILIES


def check_tasks(config: EvalConfig, family: str) -> None:
    """Refuse tasks that cannot be run, reading the examples of translation tasks alone.

    Args:
        family: of the model that is evaluated.

    Raises:
        UserError: a task is unknown, its files or a package it needs are missing, its pairs cannot be read, or it
            does not suit the model.
    """
    seen: set[str] = set()
    declared = FAMILIES[family]
    for name in (task.name for task in config.tasks):
        shown = shown_name(name)
        if shown in seen or (is_own(name) and shown in TASK_NAMES):
            raise UserError(
                f"{name} in eval.tasks describes a task named {shown}, and there is another; rename the file"
            )
        seen.add(shown)
        own_kind = ""
        if is_own(name):
            own_kind = labelled_file.find_own(Path(name))
            needs_causal = own_kind == "perplexity"
        else:
            find_task(name, config.data_dir)
            needs_causal = name == HELDOUT or (name in ZERO_SHOT_SETS and ZERO_SHOT_SETS[name].causal_only)
        if (own_kind == "translation") != declared.translates:
            kind, can = ("a translation", "cannot") if own_kind == "translation" else ("no translation", "can only")
            raise UserError(
                f"task {name} is {kind}, and model.family={family} {can} translate; remove it from eval.tasks"
            )
        if own_kind == "translation":
            bleu.check_installed()
            load_task(name, config.data_dir)
        if name == HELDOUT and config.checkpoint is not None:
            raise UserError(
                f"task {HELDOUT} reads the held-out text of a run, and eval.checkpoint is a Hugging Face model; "
                "remove it from eval.tasks"
            )
        if needs_causal and not declared.causal:
            causal = " or ".join(known for known, other in FAMILIES.items() if other.causal)
            raise UserError(
                f"task {name} needs a causal model (model.family={causal}), and model.family={family}; "
                "remove it from eval.tasks"
            )


def check_starts(config: EvalConfig) -> None:
    """Refuse tasks that cannot start from the task that they name.

    Raises:
        UserError: that task is not in the recipe, is the same, starts from another one, or nothing is trained.
    """
    tasks = {task.name: task for task in config.tasks}
    for name, source in ((task.name, task.start_from) for task in config.tasks if task.start_from is not None):
        given = f"start_from={source} of task {name} in eval.tasks"
        if source == name:
            raise UserError(f"{given} is the task itself; name another task, or remove start_from")
        if source not in tasks:
            others = ", ".join(other for other in tasks if other != name) or "none"
            raise UserError(f"{given} is not one of the other tasks ({others}); add {source} to eval.tasks")
        if further := tasks[source].start_from:
            raise UserError(
                f"{given} starts from {further} itself, and only one step is supported; remove start_from of one"
            )
        for frozen in (each for each in (name, source) if tasks[each].features or config.features):
            raise UserError(f"{given}: {frozen} has features, with which no weights are fine-tuned; remove one of them")
        for without in (each for each in (name, source) if is_zero_shot(each)):
            raise UserError(f"{given}: {without} trains nothing; remove start_from")


def check_settings(config: EvalConfig, layers: int) -> None:
    """Refuse features that the model lacks, and document context where there are no documents.

    A task's files are read for its document context alone. Set for all tasks it is for those of tagging.

    Args:
        layers: of the model that is evaluated.

    Raises:
        UserError: one of the settings is impossible, or a task's files are missing or damaged.
    """
    for section in (config, *config.tasks):
        if section.features is not None:
            section.features.indexes(layers)
    for asked in config.tasks:
        own = asked.document_context
        if own if own is not None else config.document_context:
            task = load_task(located(asked.name), config.data_dir)
            if task.kind == "tagging":
                check_documents(task)
            elif own:
                raise UserError(
                    f"document_context=true is for tagging, and the kind of task {task.name} is {task.kind}; remove it"
                )
