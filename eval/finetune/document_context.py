"""The text around a sentence in its document, for tagging.

Devlin et al. 2018, section 5.3: "we include the maximal document context provided by the data".
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.eval.tasks.task import Example, Task

Tokens = NDArray[np.int32]


def check_documents(task: Task) -> None:
    """Refuse a task of tagging whose files mark no documents.

    Raises:
        UserError: there are no documents in one of its sets.
    """
    for name, part in {"training": task.train, "development": task.dev, "test": task.test}.items():
        if part and not any(example.document for example in part):
            raise UserError(
                f"document_context=true: the {name} file of task {task.name} marks no documents; begin each document "
                "with a line -DOCSTART- or # newdoc, or set document_context=false"
            )


def contexts(
    examples: Sequence[Example], part: Sequence[Example], tokens_of: Callable[[Sequence[Example]], Sequence[Tokens]]
) -> list[tuple[Tokens, Tokens]]:
    """Return all tokens before and after each sentence in its document; none where the file marks no document.

    Args:
        examples: some of the examples of `part`.
        part: all sentences of their documents, in their order; empty: no sentence has a context.
        tokens_of: the tokens of some sentences.
    """
    nothing = np.empty(0, np.int32)
    if not part:
        return [(nothing, nothing)] * len(examples)
    wanted = {example.document for example in examples} - {0}
    neighbors = [example for example in part if example.document in wanted]
    sentences: dict[int, list[Tokens]] = defaultdict(list)
    for example, tokens in zip(neighbors, tokens_of(neighbors), strict=True):
        assert example.sentence == len(sentences[example.document])
        sentences[example.document].append(tokens)
    documents = {document: np.concatenate(tokens) for document, tokens in sentences.items()}
    ends = {document: np.cumsum([len(each) for each in tokens]) for document, tokens in sentences.items()}
    sides = []
    for example in examples:
        if not example.document:
            sides.append((nothing, nothing))
            continue
        end = ends[example.document][example.sentence]
        start = end - len(sentences[example.document][example.sentence])
        # Views: the documents are not copied for each of their sentences.
        sides.append((documents[example.document][:start], documents[example.document][end:]))
    return sides


def around(before: Tokens, after: Tokens, room: int) -> tuple[Tokens, Tokens]:
    """Return the nearest `room` tokens, half of them from each side, or more from one where the other has fewer."""
    left = min(len(before), max(room // 2, room - len(after)))
    return before[len(before) - left :], after[: room - left]
