"""The tasks by name, and those that a user's YAML file describes. Nothing in this file imports torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from multihop.common.errors import UserError
from multihop.eval.config import EvalConfig
from multihop.eval.tasks import (
    babi,
    bbc_topics,
    conll2003,
    glue,
    labeled_file,
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
    """Return the task on the run's held-out documents, which are in the data of a trial."""
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
    **{name: (partial(babi.find, name), partial(babi.read, name)) for name in babi.NAMES},
    **{name: (partial(squad.find, name), partial(squad.read, name)) for name in squad.NAMES},
    **{name: (partial(zero_shot_sets.find, name), partial(zero_shot_sets.load, name)) for name in ZERO_SHOT_SETS},
}

TASK_NAMES: tuple[str, ...] = tuple(_TASKS)


@dataclass(frozen=True)
class TaskSource:
    """A task whose files exist; its YAML file, if any, is already parsed. Its examples are read once, when needed."""

    reference: str
    """The name of the task, or the absolute path of its YAML file: workers start in another directory."""
    is_trained: bool
    """Whether models are fine-tuned on it."""
    is_translation: bool
    is_completion: bool
    needs_causal: bool
    read: Callable[[], Task]

    @property
    def needs_bleu(self) -> bool:
        """Whether its scores are those of sacrebleu."""
        return self.is_translation or self.is_completion

    @property
    def name(self) -> str:
        """The name of the task in rows."""
        return task_name(self.reference)

    @cached_property
    def task(self) -> Task:
        """The task with its examples.

        Raises:
            UserError: its files are missing or not in their official format.
        """
        return self.read()


def open_tasks(config: EvalConfig) -> list[TaskSource]:
    """Return the tasks of a recipe, in its order.

    Raises:
        UserError: as `open_task`.
    """
    return [open_task(task.name, config.data_dir) for task in config.tasks]


def open_task(name: str, data_dir: str | None) -> TaskSource:
    """Return a task by name, or by the path of the YAML file that describes it.

    Raises:
        UserError: the task is unknown, its YAML file is not valid, or its files are missing.
    """
    if has_task_file(name):
        path = Path(name)
        content = labeled_file.parse_task_file(path)
        return TaskSource(
            reference=str(path.absolute()),
            is_trained=content.kind not in ("perplexity", "translation", "completion"),
            is_translation=content.kind == "translation",
            is_completion=content.kind == "completion",
            needs_causal=False,
            read=partial(labeled_file.read_task, path, content),
        )
    if name not in _TASKS:
        raise UserError(
            f"unknown task {name!r}; known are {', '.join(TASK_NAMES)}; your own is the path of a YAML file (.yaml)"
        )
    find, read = _TASKS[name]
    find(data_dir)
    return TaskSource(
        reference=name,
        is_trained=name != HELDOUT and name not in ZERO_SHOT_SETS,
        is_translation=False,
        is_completion=False,
        needs_causal=name == HELDOUT or (name in ZERO_SHOT_SETS and ZERO_SHOT_SETS[name].causal_only),
        read=partial(read, data_dir),
    )


def load_task(name: str, data_dir: str | None) -> Task:
    """Return a task with its examples, as a worker reads it.

    Raises:
        UserError: as `open_task`; or its files are not in their official format.
    """
    return open_task(name, data_dir).task


def task_name(reference: str) -> str:
    """Return the name of a task in rows: of a YAML file, its name without the extension."""
    return Path(reference).stem if has_task_file(reference) else reference


def has_task_file(name: str) -> bool:
    """Return whether a task is described by a YAML file."""
    return Path(name).suffix in (".yaml", ".yml")
