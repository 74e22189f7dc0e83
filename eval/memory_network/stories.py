"""bAbI's stories as arrays: sentences as word ids, and questions as the sentences that precede them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError

TASKS = range(1, 21)
"""The numbers of bAbI's tasks."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Question:
    """A question and the statements before it in its story."""

    task: int
    statements: tuple[str, ...]
    """Oldest first."""
    text: str
    answer: str
    """One word, or several with commas: "milk,apple" is an answer of its own, as in the authors' code."""


@dataclass(frozen=True)
class Stories:
    """Q questions over U different sentences of at most J words. Word 0 and sentence 0 are padding."""

    sentences: NDArray[np.int64]
    """(U, J), word ids."""
    memories: NDArray[np.int64]
    """(Q, M), the sentence in each memory, the newest first; 0: empty."""
    sizes: NDArray[np.int64]
    """(Q,), number of memories that are not empty."""
    questions: NDArray[np.int64]
    """(Q,), the question's sentence."""
    answers: NDArray[np.int64]
    """(Q,), the answer's word id."""
    tasks: NDArray[np.int64]
    """(Q,), the task's number."""

    def __len__(self) -> int:
        return len(self.questions)

    def rows(self, rows: NDArray[np.bool_]) -> "Stories":
        """Return some of the questions, with the same sentences."""
        return replace(
            self,
            memories=self.memories[rows],
            sizes=self.sizes[rows],
            questions=self.questions[rows],
            answers=self.answers[rows],
            tasks=self.tasks[rows],
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


def words_of(text: str) -> list[str]:
    """Return the words of a sentence in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def vocabulary(questions: Iterable[Question]) -> dict[str, int]:
    """Return the ids, from 1, of the words of statements, questions and answers, in alphabetical order."""
    words = {
        word
        for question in questions
        for word in [*(w for text in (*question.statements, question.text) for w in words_of(text)), question.answer]
    }
    return {word: number for number, word in enumerate(sorted(words), 1)}


def encode_stories(questions: Sequence[Question], words: dict[str, int], memory_size: int) -> Stories:
    """Encode questions; of longer stories only the newest `memory_size` statements are kept.

    Args:
        words: ids of all words and answers.
    """
    ids: dict[tuple[int, ...], int] = {(): 0}

    def sentence(text: str) -> int:
        return ids.setdefault(tuple(words[word] for word in words_of(text)), len(ids))

    memories = np.zeros((len(questions), memory_size), np.int64)
    sizes = np.zeros(len(questions), np.int64)
    asked = np.zeros(len(questions), np.int64)
    for row, question in enumerate(questions):
        newest = [sentence(text) for text in question.statements[-memory_size:]][::-1]
        memories[row, : len(newest)] = newest
        sizes[row] = len(newest)
        asked[row] = sentence(question.text)
    sentences = np.zeros((len(ids), max(map(len, ids))), np.int64)
    for key, row in ids.items():
        sentences[row, : len(key)] = key
    return Stories(
        sentences=sentences,
        memories=memories,
        sizes=sizes,
        questions=asked,
        answers=np.array([words[question.answer] for question in questions], np.int64),
        tasks=np.array([question.task for question in questions], np.int64),
    )
