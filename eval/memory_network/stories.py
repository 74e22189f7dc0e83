"""bAbI's stories as arrays: sentences as word ids, and questions with the sentences that precede them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from multihop.eval.tasks.babi import Question

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Stories:
    """Q questions over U distinct sentences of at most J words. Word 0 and sentence 0 are padding."""

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


def words_of(text: str) -> list[str]:
    """Return the words of a sentence in lower case, without punctuation."""
    return _WORD.findall(text.lower())


def _answer(question: Question) -> str:
    """Return the answer in lower case, as the words of sentences are: with adjacent tying a name is the same word in
    both."""
    return question.answer.lower()


def vocabulary(questions: Iterable[Question]) -> dict[str, int]:
    """Return the ids, from 1, of the words of statements, questions and answers, in alphabetical order."""
    words = {
        word
        for question in questions
        for word in [*(w for text in (*question.statements, question.text) for w in words_of(text)), _answer(question)]
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
        answers=np.array([words[_answer(question)] for question in questions], np.int64),
        tasks=np.array([question.task for question in questions], np.int64),
    )
