"""Questions and contexts as model inputs: a context that is too long is cut into overlapping windows.

Devlin et al. 2018, section 4.2, and the `run_squad.py` published with it (google-research/bert).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.finetune.span_offsets import Tokens, tokens_with_offsets
from multihop.eval.finetune.templates import Template
from multihop.eval.tasks.task import Example


@dataclass(frozen=True)
class Window:
    """A question and a part of its context, of T tokens, C of which are the context's."""

    example: int
    """Index of the example."""
    ids: NDArray[np.integer[Any]]
    """(T,): the question and the part of the context in the template."""
    second_starts: int
    """Index of the first token of the context. Segment 1 begins with it."""
    starts: NDArray[np.integer[Any]]
    """(C,): offset in the context, in characters, at which the word of each context token begins."""
    ends: NDArray[np.integer[Any]]
    """(C,): offset at which that word ends, exclusive."""
    has_max_context: NDArray[np.bool_]
    """(C,): whether this window has most context for the token; true in exactly one window for each token."""
    null: int
    """Index of the token whose logits say that there is no answer."""
    start: int
    """Index of the first token of the example's first answer, if that lies within the window, otherwise `null`."""
    end: int
    """Index of the last token (inclusive) of that answer, or `null`."""


def windows(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    template: Template,
    null_last: bool,
    seq_len: int,
    stride: int = 128,
    max_question: int = 64,
) -> list[Window]:
    """Return the windows of each example, in the order of the examples and of their contexts.

    Args:
        null_last: whether the null position is the last token, as in a causal model, where it sees all others, or
            where it is the cls token; otherwise it is the first one.
        seq_len: maximum length of a window in tokens, with the template.
        stride: tokens of the context from the start of a window to the start of the next one; at most half of the
            context's tokens in a window, so that any answer of at most that length lies within a window.
        max_question: maximum length of a question in tokens; longer ones are cut.

    Raises:
        UserError: `seq_len` has no room for context; a context has no token.
    """
    special = template.size(2)
    if seq_len <= max_question + special:
        raise UserError(
            f"eval.seq_len={seq_len} leaves no room for a context after a question of up to {max_question} tokens and "
            f"{special} special tokens; expected at least {max_question + special + 1}; 384 is usual"
        )
    # Five questions share a context on average.
    unique = list(dict.fromkeys(text for example in examples for text in example.texts))
    tokens_of = dict(zip(unique, tokens_with_offsets(unique, tokenizer), strict=True))
    cut = []
    for index, example in enumerate(examples):
        question, context = (tokens_of[text] for text in example.texts)
        if len(context.ids) == 0:
            raise UserError(
                f"the context of question {example.id} has no token in this tokenizer's vocabulary; "
                "leave the question out, or train the tokenizer on text of the same script"
            )
        head = [*template.before, *question.ids[:max_question].tolist(), *template.between]
        parts = _parts(len(context.ids), seq_len - len(head) - len(template.after), stride)
        widest = _widest(parts, len(context.ids))
        first, last = _answer(example, context)
        for number, (begin, behind) in enumerate(parts):
            ids = np.concatenate([head, context.ids[begin:behind], template.after]).astype(np.int64)
            null = len(ids) - 1 if null_last else 0
            inside = begin <= first <= last < behind
            cut.append(
                Window(
                    example=index,
                    ids=ids,
                    second_starts=len(head),
                    starts=context.starts[begin:behind],
                    ends=context.ends[begin:behind],
                    has_max_context=widest[begin:behind] == number,
                    null=null,
                    start=len(head) + first - begin if inside else null,
                    end=len(head) + last - begin if inside else null,
                )
            )
    return cut


def _parts(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return the first token of each window of a context, and the one behind its last."""
    parts = [(0, min(room, tokens))]
    while parts[-1][1] < tokens:
        begin = parts[-1][0] + min(stride, max(1, room // 2))
        parts.append((begin, min(begin + room, tokens)))
    return parts


def _widest(parts: list[tuple[int, int]], tokens: int) -> NDArray[np.int64]:
    """Return the window in which each token has most context: the smaller of its left and right context in tokens, plus
    a hundredth of the window's; the first of equals. int64 (tokens,)."""
    begin, behind = (np.array(column)[:, None] for column in zip(*parts, strict=True))
    at = np.arange(tokens)
    # In hundredths, so that equal scores are equal.
    score = 100 * np.minimum(at - begin, behind - 1 - at) + behind - begin
    return np.where((begin <= at) & (at < behind), score, -1).argmax(0)


def _answer(example: Example, context: Tokens) -> tuple[int, int]:
    """Return the first and the last token of the first answer; the last before the first if it has none."""
    if not example.targets:
        return 0, -1
    first = int(np.searchsorted(context.ends, example.targets[0], side="right"))
    last = int(np.searchsorted(context.starts, example.targets[1], side="left")) - 1
    return first, last
