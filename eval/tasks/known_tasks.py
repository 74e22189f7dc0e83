"""The tasks by name. Nothing here imports torch: recipes are validated with it."""

from functools import partial
from pathlib import Path
from typing import Protocol

from multihop.common.errors import UserError
from multihop.eval.tasks import (
    bbc_topics,
    conll2003,
    glue,
    labelled_file,
    multiple_choice,
    squad,
    vader_reviews,
    zero_shot_sets,
)
from multihop.eval.tasks.task import Task
from multihop.eval.tasks.zero_shot_sets import ZERO_SHOT_SETS

HELDOUT = "heldout-perplexity"


class _Find(Protocol):
    def __call__(self, data_dir: str | None) -> object: ...


class _Read(Protocol):
    def __call__(self, data_dir: str | None) -> Task: ...


def _read_heldout(data_dir: str | None) -> Task:
    """The task on the run's held-out documents, which are in the data of a trial."""
    return Task(
        name=HELDOUT,
        kind="zero-shot",
        metric="perplexity",
        higher_is_better=False,
        source="The run's own held-out documents.",
    )


_TASKS: dict[str, tuple[_Find, _Read]] = {
    "bbc-topics": (bbc_topics.find, bbc_topics.read),
    "conll2003": (conll2003.find, conll2003.read),
    "conll2003-pos": (conll2003.find, conll2003.read_pos),
    "vader-reviews": (vader_reviews.find, vader_reviews.read),
    HELDOUT: (lambda data_dir: None, _read_heldout),
    **{name: (partial(glue.find, name), partial(glue.read, name)) for name in glue.NAMES},
    **{
        name: (partial(multiple_choice.find, name), partial(multiple_choice.read, name))
        for name in multiple_choice.NAMES
    },
    **{name: (partial(squad.find, name), partial(squad.read, name)) for name in squad.NAMES},
    **{name: (partial(zero_shot_sets.find, name), partial(zero_shot_sets.load, name)) for name in ZERO_SHOT_SETS},
}

TASK_NAMES: tuple[str, ...] = tuple(_TASKS)


def find_task(name: str, data_dir: str | None) -> object:
    """The official files of a task by name, without reading them.

    Raises:
        UserError: the task is unknown, or its files are missing.
    """
    return _known(name)[0](data_dir)


def located(name: str) -> str:
    """The name as a worker, which starts in another directory, finds the task by."""
    return str(Path(name).absolute()) if is_own(name) else name


def shown_name(name: str) -> str:
    """The name of a task in rows: of one's own task, the name of its file."""
    return Path(name).stem if is_own(name) else name


def is_zero_shot(name: str) -> bool:
    """Whether a task is without training."""
    own = is_own(name) and labelled_file.find_own(Path(name)) in ("perplexity", "translation")
    return own or name == HELDOUT or name in ZERO_SHOT_SETS


def load_task(name: str, data_dir: str | None) -> Task:
    """Read a task's official files.

    Args:
        name: of a task, or the path of the YAML file that describes one's own.

    Raises:
        UserError: the task is unknown, or its files are missing or not in their official format.
    """
    return labelled_file.read_own(Path(name)) if is_own(name) else _known(name)[1](data_dir)


def is_own(name: str) -> bool:
    """Whether a task is described by a YAML file."""
    return Path(name).suffix in (".yaml", ".yml")


def _known(name: str) -> tuple[_Find, _Read]:
    if name not in _TASKS:
        raise UserError(
            f"unknown task {name!r}; known are {', '.join(TASK_NAMES)}; your own is the path of a YAML file (.yaml)"
        )
    return _TASKS[name]
