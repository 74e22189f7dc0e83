"""The 20 bAbI tasks with memory networks: each task alone, or one network for all, and a report beside the paper's.

A row of OUT/results.jsonl is the result of a task; a row with the same settings, seed and files is not computed again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from multihop.common.errors import UserError
from multihop.common.files import sha256_file, sha256_json
from multihop.common.json_lines import append_row, read_rows
from multihop.eval.config import MAX_HOPS
from multihop.eval.memory_network.stories import Stories, encode_stories, vocabulary
from multihop.eval.memory_network.training import (
    TrainedNetworks,
    TrainingSettings,
    answer,
    attend,
    predicted,
    train_networks,
)
from multihop.eval.tasks.babi import TASKS, Question, read_questions, task_files

RESULTS = "results.jsonl"
_KEY_VERSION = 5
"""Changes with the training or the row, so that older rows are not used."""
_MAX_STATEMENTS = 12
"""Maximum number of statements in the recorded example."""

PUBLISHED_SINGLE_TASK = dict(
    zip(
        TASKS,
        (0.0, 8.3, 40.3, 2.8, 13.1, 7.6, 17.3, 10.0, 13.2, 15.1, 0.9, 0.2, 0.4, 1.7, 0.0, 1.3, 51.0, 11.1, 82.8, 0.0),
        strict=True,
    )
)
"""Test errors in percent of Sukhbaatar et al. 2015, table 1, PE LS RN: three hops, each task alone; mean 13.9."""
PUBLISHED_JOINT = dict(
    zip(
        TASKS,
        (0.0, 11.4, 21.9, 13.4, 14.4, 2.8, 18.3, 9.3, 1.9, 6.5, 0.3, 0.1, 0.2, 6.9, 0.0, 2.7, 40.4, 9.4, 88.0, 0.0),
        strict=True,
    )
)
"""The same with three hops, PE LS RN joint; mean 12.4."""


@dataclass(frozen=True)
class _TaskData:
    """A task's questions and files."""

    task: int
    name: str
    train: list[Question]
    test: list[Question]
    unused: int
    """Stories of both files that have no question."""
    sha256: str


def run_babi(
    folder: Path,
    out: Path,
    tasks: Sequence[int],
    joint: bool,
    settings: TrainingSettings,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """Train and test networks, and return a row for each task.

    Args:
        folder: the official files in English, 1,000 questions a task.
        joint: train one network on all of the tasks.
        progress: called with what is trained, the epochs done and their number.

    Raises:
        UserError: a task or number of hops does not exist, or a file is missing or not in the official format.
    """
    unknown = [task for task in tasks if task not in TASKS]
    if unknown or not tasks:
        raise UserError(f"tasks {list(tasks)}: bAbI has the tasks 1 to 20; give some of them")
    if not 1 <= settings.hops <= MAX_HOPS:
        raise UserError(f"--hops {settings.hops}: expected 1 to {MAX_HOPS} (3 is usual)")
    data = [_read(folder, task) for task in dict.fromkeys(tasks)]
    done = {row["key"]: row for row in read_rows(out / RESULTS)}
    rows: list[dict[str, Any]] = []
    for group in [data] if joint else [[each] for each in data]:
        keys = [_key(each, group, joint, settings, seed) for each in group]
        if not all(key in done for key in keys):
            what = f"{len(group)} tasks" if len(group) > 1 else f"task {group[0].task}"
            found = _train_and_test(group, settings, seed, partial(progress, what))
            for key, row in zip(keys, found, strict=True):
                if key not in done:
                    done[key] = {"key": key, "joint": joint, "seed": seed, "settings": asdict(settings), **row}
                    append_row(out / RESULTS, done[key])
        rows += [done[key] for key in keys]
    return rows


def _read(folder: Path, task: int) -> _TaskData:
    files = task_files(folder, task)
    (train, unused), (test, unused_in_test) = (read_questions(path, task) for path in files)
    name = files[0].name.removeprefix(f"qa{task}_").removesuffix("_train.txt").replace("-", " ")
    return _TaskData(
        task, name, train, test, unused + unused_in_test, sha256_json([sha256_file(path) for path in files])
    )


def _key(task: _TaskData, group: Sequence[_TaskData], joint: bool, settings: TrainingSettings, seed: int) -> str:
    files = [each.sha256 for each in group]
    return sha256_json([_KEY_VERSION, task.task, files, joint, asdict(settings), seed])


def _train_and_test(
    group: Sequence[_TaskData], settings: TrainingSettings, seed: int, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Train networks on the tasks of a group, and return each task's results."""
    train = [question for task in group for question in task.train]
    test = [question for task in group for question in task.test]
    words = vocabulary([*train, *test])
    stories = encode_stories([*train, *test], words, settings.memory_size)
    is_test = np.arange(len(stories)) >= len(train)
    began = time.perf_counter()
    trained = train_networks(stories.rows(~is_test), len(words) + 1, settings, seed, progress)
    seconds = time.perf_counter() - began
    tested = stories.rows(is_test)
    wrong, _ = answer(trained.model, tested, np.arange(len(tested)))
    validated, trained_on = (stories.tasks[~is_test][each] for each in (trained.validation, trained.training))
    names = {number: word for word, number in words.items()}
    rows = []
    for task in group:
        own = np.flatnonzero(tested.tasks == task.task)
        rows.append(
            {
                "task": task.task,
                "name": task.name,
                "questions": len(own),
                "stories_without_question": task.unused,
                "error": float(wrong[trained.chosen, own].mean()),
                "validation_error": _share(trained.validation_wrong[trained.chosen, validated == task.task]),
                "training_error": _share(trained.training_wrong[trained.chosen, trained_on == task.task]),
                "errors_of_restarts": wrong[:, own].mean(1).tolist(),
                "seconds": seconds,
                "example": _example(trained, tested, test, wrong[trained.chosen], own, names),
            }
        )
    return rows


def _share(wrong: np.ndarray[Any, np.dtype[np.bool_]]) -> float | None:
    """Return the share of wrong answers; None without questions, as where few questions of a task are held out."""
    return float(wrong.mean()) if len(wrong) else None


def _example(
    trained: TrainedNetworks,
    tested: Stories,
    questions: Sequence[Question],
    wrong: np.ndarray[Any, np.dtype[np.bool_]],
    own: np.ndarray[Any, np.dtype[np.int64]],
    names: dict[int, str],
) -> dict[str, Any]:
    """Return a question with the attention of each hop: the first with a right answer and a short story, if any."""
    fitting = [i for i in own if not wrong[i] and tested.sizes[i] <= _MAX_STATEMENTS]
    chosen = int([*fitting, own[0]][0])
    logits, attention = attend(trained.model, tested, np.array([chosen]))
    # The newest statement is the first memory; of a longer story than those of the training the oldest have none.
    statements = questions[chosen].statements[-min(_MAX_STATEMENTS, attention[0].shape[-1]) :]
    by_hop = [hop[trained.chosen, 0, : len(statements)].flip(0).tolist() for hop in attention]
    return {
        "statements": list(statements),
        "question": questions[chosen].text,
        "answer": questions[chosen].answer,
        "predicted": names[int(predicted(logits[trained.chosen, 0]))],
        "attention": by_hop,
    }
