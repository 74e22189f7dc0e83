"""babi: the answers to questions about short stories in 20 tasks (Weston et al. 2015)."""

import re
from dataclasses import dataclass
from pathlib import Path

from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example, Task, unit_hash
from multihop.eval.tasks.text_files import official_folder

TASKS = range(1, 21)
"""The numbers of bAbI's tasks."""
NAMES = tuple(f"babi/{task}" for task in TASKS)
_WORD = re.compile(r"\w+")
_VALIDATION = 0.1
"""Share of the training questions that is the development set, as in Sukhbaatar et al. 2015."""


@dataclass(frozen=True)
class Question:
    """A question and the statements before it in its story."""

    task: int
    statements: tuple[str, ...]
    """Oldest first."""
    text: str
    answer: str
    """One word, or several with commas: "milk,apple" is an answer of its own, as in the authors' code."""


def find(name: str, data_dir: str | None) -> tuple[Path, Path]:
    """Return a task's official files, in the directory `babi/en` of `data_dir`. Raises UserError as `task_files`."""
    return task_files(official_folder(data_dir) / "babi" / "en", int(name.removeprefix("babi/")))


def read(name: str, data_dir: str | None) -> Task:
    """Read a task as classification: the classes are the answers, a pair is a question and the statements before it.

    The newest statement comes first, so that truncation drops the oldest.

    Raises:
        UserError: as `task_files` and `read_questions`.
    """
    number = int(name.removeprefix("babi/"))
    (train, unused), (test, unused_in_test) = (read_questions(path, number) for path in find(name, data_dir))
    labels = tuple(sorted({question.answer for question in (*train, *test)}))

    def example(question: Question) -> Example:
        return Example((question.text, " ".join(reversed(question.statements))), (labels.index(question.answer),))

    by_hash = sorted(range(len(train)), key=lambda i: (unit_hash(f"babi {number} {i}"), i))
    dev = set(by_hash[: round(_VALIDATION * len(train))])
    notes = f"{_VALIDATION:.0%} of the training questions are the development set"
    if unused or unused_in_test:
        notes += f"; {unused + unused_in_test} stories without a question are not used"
    return Task(
        name=name,
        kind="classification",
        metric="accuracy",
        higher_is_better=True,
        source="bAbI tasks version 1.1 (Weston et al. 2015), 1,000 questions each, CC BY 3.0.",
        labels=labels,
        train=tuple(example(question) for i, question in enumerate(train) if i not in dev),
        dev=tuple(example(train[i]) for i in sorted(dev)),
        test=tuple(example(question) for question in test),
        notes=notes,
    )


def task_files(folder: Path, task: int) -> tuple[Path, Path]:
    """Return the official files with the training and test questions of a task.

    Raises:
        UserError: they are not there.
    """
    found = [sorted(folder.glob(f"qa{task}_*_{part}.txt")) for part in ("train", "test")]
    if any(len(paths) != 1 for paths in found):
        raise UserError(
            f"{folder} has {len(found[0])} files qa{task}_*_train.txt and {len(found[1])} files qa{task}_*_test.txt; "
            "expected one of each; give the directory `en` of bAbI's tasks_1-20_v1-1"
        )
    return found[0][0], found[1][0]


def read_questions(path: Path, task: int) -> tuple[list[Question], int]:
    """Read an official file: lines "ID statement" and "ID question<tab>answer<tab>supporting ids"; ID 1 begins a story.

    Returns:
        The questions, and the number of stories that have none: 428 and 452 in the files of task 16.

    Raises:
        UserError: a line has another form, a question has no answer or no statement before it, or no story has a
            question.
    """
    questions: list[Question] = []
    statements: list[str] = []
    asked, unused = True, 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}; download it again") from None
    for number, line in enumerate(lines, 1):
        at = f"{path}, line {number}"
        identifier, _, content = line.partition(" ")
        text, *rest = content.split("\t")
        if not identifier.isdecimal() or not _WORD.search(text) or len(rest) not in (0, 2):
            raise UserError(
                f"{at}: {line[:80]!r} is not a line of bAbI; expected 'ID statement' or 'ID question<tab>answer<tab>"
                "supporting ids'"
            )
        if identifier == "1":
            unused += not asked
            statements, asked = [], False
        if not rest:
            statements.append(text)
            continue
        if not statements:
            raise UserError(f"{at}: no statement precedes the question, so its memory is empty; add one or remove it")
        if not (answer := rest[0].strip()):
            raise UserError(f"{at}: the question has no answer; add it, or remove the line")
        questions.append(Question(task, tuple(statements), text.strip(), answer))
        asked = True
    if not questions:
        raise UserError(f"{path}: no story has a question; expected a file of bAbI, such as qa1_*_train.txt")
    return questions, unused + (not asked)
