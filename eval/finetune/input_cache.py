"""The encoded examples of a task, made once on a machine and mapped by all its trials.

A folder for each (task's files, tokenizer, special tokens, length, numbers of examples, document context): see
`multihop.eval.finetune.cached_folder`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.config import TrialSettings
from multihop.eval.finetune.cached_folder import cached_folder
from multihop.eval.finetune.inputs import Encoded, encode
from multihop.eval.finetune.templates import Template
from multihop.eval.tasks.task import Example, Task, at_most, is_reported

_FORMAT = 2
_TASK = "task.json"
_KEY_SETTINGS = {"seq_len", "max_examples", "max_dev_examples", "report_on", "document_context"}


@dataclass(frozen=True)
class TaskInputs:
    """The encoded examples of a trial."""

    task: Task
    """The task without its examples."""
    sets: Mapping[str, Encoded]
    """train, dev and test, and the task's other sets and those without labels by their names."""
    ids: Mapping[str, list[str]]
    """The official ids of each set's examples."""
    reported_on: str
    """The examples that `test` consists of: "test", "half of dev" or "dev"."""


def task_inputs(
    load: Callable[[], Task],
    fingerprint: str,
    tokenizer: Tokenizer,
    tokenizer_sha256: str,
    template: Template,
    both_orders: bool,
    settings: TrialSettings,
) -> TaskInputs:
    """Return the encoded examples, from the cache; they are encoded if the cache lacks them.

    Args:
        load: reads the task's files.
        fingerprint: the fingerprint of the task that `load` returns.
        both_orders: whether a pair without an order is given in both.
    """
    chosen = settings.model_dump(mode="json", include=_KEY_SETTINGS)
    folder = cached_folder(
        [_FORMAT, fingerprint, tokenizer_sha256, asdict(template), both_orders, chosen],
        lambda new: _make(new, load(), tokenizer, template, both_orders, settings),
    )
    content = json.loads((folder / _TASK).read_text())
    return TaskInputs(
        task=task_of(content["task"]),
        sets={name: Encoded.load(folder / directory) for name, directory in content["sets"].items()},
        ids=content["ids"],
        reported_on=content["reported_on"],
    )


def selected(task: Task, settings: TrialSettings) -> tuple[dict[str, list[Example]], str]:
    """Return the examples of each set that trials use, and of which `test` consists: "test", "half of dev" or "dev".

    Raises:
        UserError: there are none to train on, to choose by or to report.
    """
    test, reported_on = task.reported(settings.report_on)
    dev = [example for example in task.dev if reported_on != "half of dev" or not is_reported(example)]
    sets = {
        "train": at_most(task.train, settings.max_examples),
        "dev": at_most(dev, settings.max_dev_examples),
        "test": test,
        **{name: list(examples) for name, examples in {**task.other_sets, **task.unlabeled}.items()},
    }
    for name in ("train", "dev", "test"):
        if not sets[name]:
            raise UserError(f"task {task.name} has no {name} examples; add some, or set eval.report_on=dev")
    return sets, reported_on


def described(task: Task) -> dict[str, Any]:
    """Return a task without its examples, as plain JSON values."""
    values = asdict(replace(task, train=(), dev=(), test=(), other_sets={}, unlabeled={}))
    return values | {"other_sets": list(task.other_sets), "unlabeled": list(task.unlabeled)}


def task_of(values: dict[str, Any]) -> Task:
    """Restore the task from what `described` returned."""
    tuples = {name: tuple(values[name]) for name in ("labels", "other_metrics")}
    empty = {name: {each: () for each in values[name]} for name in ("other_sets", "unlabeled")}
    return Task(**values | tuples | empty)


def _make(
    folder: Path, task: Task, tokenizer: Tokenizer, template: Template, both_orders: bool, settings: TrialSettings
) -> None:
    sets, reported_on = selected(task, settings)
    whole = {"train": task.train, "dev": task.dev, "test": task.test or task.dev, **task.other_sets, **task.unlabeled}
    for number, (name, examples) in enumerate(sets.items()):
        context = whole[name] if settings.document_context else ()
        symmetric = both_orders and task.symmetric
        encoded = encode(examples, task.kind, tokenizer, template, settings.seq_len, symmetric, context)
        encoded.save(folder / str(number))
    content = {
        "task": described(task),
        "sets": {name: str(number) for number, name in enumerate(sets)},
        "ids": {name: [example.id for example in examples] for name, examples in sets.items()},
        "reported_on": reported_on,
    }
    (folder / _TASK).write_text(json.dumps(content))
