"""The tasks by name. Nothing here imports torch: a recipe is checked with it."""

from pathlib import Path
from typing import Protocol

from eval.config import EvalConfig
from eval.tasks import bbc_topics, conll2003, heldout_perplexity, vader_reviews
from eval.tasks.task import Example, Kind, Task
from pretrain.presets import OBJECTIVES, Family

__all__ = ["TASK_NAMES", "Example", "Kind", "Task", "check_tasks", "load_task"]


class _Reader(Protocol):
    def find(self, data_dir: str | None) -> Path | None: ...

    def read(self, data_dir: str | None) -> Task: ...


_READERS: dict[str, _Reader] = {
    "bbc-topics": bbc_topics,
    "conll2003": conll2003,
    "vader-reviews": vader_reviews,
    "heldout-perplexity": heldout_perplexity,
}

TASK_NAMES: tuple[str, ...] = tuple(_READERS)


def check_tasks(config: EvalConfig, family: Family) -> None:
    """Refuse tasks that cannot be run, without reading them.

    Args:

    Raises:
        ValueError: a task is not known, its files are not there, or the model cannot do it.
    """
    for name in config.tasks:
        _reader(name).find(config.data_dir)
        if name == "heldout-perplexity" and OBJECTIVES[family] != "clm":
            raise ValueError(
                f"task heldout-perplexity needs a model that predicts the next piece (model.family=gpt2 or gpt), and "
                f"model.family={family}; remove it from eval.tasks"
            )


def load_task(name: str, data_dir: str | None) -> Task:
    """Read a task's official files.

    Raises:
        ValueError: the task is not known, or its files are missing or not in their official format.
    """
    return _reader(name).read(data_dir)


def _reader(name: str) -> _Reader:
    if name not in _READERS:
        raise ValueError(f"task {name!r} is not known; there are: {', '.join(TASK_NAMES)}")
    return _READERS[name]
