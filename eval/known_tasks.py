"""The tasks by name. Nothing here imports torch: recipes are validated with it."""

from functools import partial
from pathlib import Path
from typing import Protocol

from multihop.common.errors import UserError
from multihop.eval.config import EvalConfig
from multihop.eval.tasks import (
    bbc_topics,
    conll2003,
    glue,
    heldout_perplexity,
    labelled_file,
    multiple_choice,
    squad,
    vader_reviews,
)
from multihop.eval.tasks.task import Task
from multihop.eval.translation import bleu
from multihop.eval.zero_shot import tasks as zero_shot
from multihop.eval.zero_shot.tasks import ZERO_SHOT_TASKS
from multihop.pretrain.models.families import FAMILIES

HELDOUT = "heldout-perplexity"


class _Find(Protocol):
    def __call__(self, data_dir: str | None) -> object: ...


class _Read(Protocol):
    def __call__(self, data_dir: str | None) -> Task: ...


_TASKS: dict[str, tuple[_Find, _Read]] = {
    "bbc-topics": (bbc_topics.find, bbc_topics.read),
    "conll2003": (conll2003.find, conll2003.read),
    "conll2003-pos": (conll2003.find, conll2003.read_pos),
    "vader-reviews": (vader_reviews.find, vader_reviews.read),
    HELDOUT: (heldout_perplexity.find, heldout_perplexity.read),
    **{name: (partial(glue.find, name), partial(glue.read, name)) for name in glue.NAMES},
    **{
        name: (partial(multiple_choice.find, name), partial(multiple_choice.read, name))
        for name in multiple_choice.NAMES
    },
    **{name: (partial(squad.find, name), partial(squad.read, name)) for name in squad.NAMES},
    **{name: (partial(zero_shot.find, name), partial(zero_shot.load, name)) for name in ZERO_SHOT_TASKS},
}

TASK_NAMES: tuple[str, ...] = tuple(_TASKS)


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
        if shown in seen or (_is_own(name) and shown in _TASKS):
            raise UserError(
                f"{name} in eval.tasks describes a task named {shown}, and there is another; rename the file"
            )
        seen.add(shown)
        own_kind = ""
        if _is_own(name):
            own_kind = labelled_file.find_own(Path(name))
            needs_causal = own_kind == "perplexity"
        else:
            _known(name)[0](config.data_dir)
            needs_causal = name == HELDOUT or (name in ZERO_SHOT_TASKS and ZERO_SHOT_TASKS[name].causal_only)
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


def located(name: str) -> str:
    """The name as a worker, which starts in another directory, finds the task by."""
    return str(Path(name).absolute()) if _is_own(name) else name


def shown_name(name: str) -> str:
    """The name of a task in rows: of one's own task, the name of its file."""
    return Path(name).stem if _is_own(name) else name


def is_zero_shot(name: str) -> bool:
    """Whether a task is without training."""
    own = _is_own(name) and labelled_file.find_own(Path(name)) in ("perplexity", "translation")
    return own or name == HELDOUT or name in ZERO_SHOT_TASKS


def load_task(name: str, data_dir: str | None) -> Task:
    """Read a task's official files.

    Args:
        name: of a task, or the path of the YAML file that describes one's own.

    Raises:
        UserError: the task is unknown, or its files are missing or not in their official format.
    """
    return labelled_file.read_own(Path(name)) if _is_own(name) else _known(name)[1](data_dir)


def _is_own(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def _known(name: str) -> tuple[_Find, _Read]:
    if name not in _TASKS:
        raise UserError(
            f"unknown task {name!r}; known are {', '.join(TASK_NAMES)}; your own is the path of a YAML file (.yaml)"
        )
    return _TASKS[name]
