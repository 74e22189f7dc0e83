"""Multiple choice by likelihood: the continuation that a causal model finds most likely after the context.

The scores are those of the Language Model Evaluation Harness (Gao et al. 2021): the sum of the log-probabilities
(its acc; Brown et al. 2020, section 2.4), and the same divided by the continuation's characters (its acc_norm).
"""

from collections.abc import Sequence

import numpy as np

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.tasks.task import Example
from multihop.eval.zero_shot.scoring import (
    BATCH_TOKENS,
    ZeroShotResult,
    accuracy_result,
    encode_continuations,
    log_likelihoods,
)
from multihop.pretrain.models.layers.model import Model


def evaluate_choices(
    model: Model,
    tokenizer: Tokenizer,
    special_ids: dict[str, int],
    examples: Sequence[Example],
    batch_tokens: int = BATCH_TOKENS,
) -> ZeroShotResult:
    """Return the accuracy of the most likely continuation, and of the most likely per token and per character.

    Args:
        examples: examples of kind choice; one space is put between a context and its continuations.

    Raises:
        UserError: there is no example, or one has no label; the model is not causal, or a continuation is too long.
    """
    if not examples:
        raise UserError("a task of kind choice needs at least one example, but this one has none")
    for number, example in enumerate(examples, start=1):
        if len(example.targets) != 1:
            raise UserError(f"example {number} has no label, and accuracy needs one; choose a labeled set")
    parts = [_spaced(example) for example in examples]
    continuations = [encode_continuations(tokenizer, special_ids, context, each) for context, each in parts]
    scores = iter(log_likelihoods(model, [one for each in continuations for one in each], batch_tokens))
    hits = np.zeros((len(examples), 3), bool)
    for index, (example, (_, texts)) in enumerate(zip(examples, parts, strict=True)):
        candidates = [next(scores) for _ in texts]
        values = np.array([each.value for each in candidates])
        tokens = np.array([each.tokens for each in candidates])
        sizes = np.array([max(1, len(text.strip())) for text in texts])
        chosen = [(values / length).argmax() for length in (1, tokens, sizes)]
        hits[index] = np.array(chosen) == int(example.targets[0])
    return accuracy_result(
        hits[:, 0],
        {
            "accuracy per token": float(hits[:, 1].mean()),
            "accuracy per character": float(hits[:, 2].mean()),
            "chance": float(np.mean([1 / len(texts) for _, texts in parts])),
        },
    )


def _spaced(example: Example) -> tuple[str, list[str]]:
    context, *continuations = example.texts
    context = context.rstrip()
    blank = " " if context else ""
    return context, [blank + each.lstrip() for each in continuations]
