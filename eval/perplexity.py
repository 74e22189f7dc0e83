"""Zero-shot: the perplexity of a causal model on held-out documents, beside a model that knows less."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import Documents
from pretrain.models.gpt import GPT
from pretrain.models.gpt2 import GPT2
from pretrain.models.inputs import on_device
from pretrain.models.vocabulary import vocabulary_loss
from pretrain.objectives.batch import Inputs, layout
from pretrain.references import unigram_loss

_BATCH = 16


@torch.no_grad()
def cross_entropy(model: GPT | GPT2, documents: Documents, end_id: int, seq_len: int) -> tuple[float, int]:
    """Mean cross-entropy in nats a piece over all documents, and the number of pieces.

    Each document is read from its beginning, after the end piece that closed the one before. What is longer than
    `seq_len` is read in windows that overlap by half: every piece is predicted exactly once, from at least
    `seq_len // 2` pieces before it where the document has so many.
    """
    model.eval()
    device = next(model.parameters()).device
    total, pieces = 0.0, 0
    waiting: list[tuple[NDArray[np.int64], int]] = []

    def flush() -> None:
        nonlocal total
        bounds = np.cumsum([0, *(len(window) - 1 for window, _ in waiting)])
        asked = np.concatenate(
            [np.arange(first, len(window) - 1) + start for (window, first), start in zip(waiting, bounds, strict=False)]
        )
        inputs: Inputs = {
            "input_ids": np.concatenate([window[:-1] for window, _ in waiting]),
            **layout(np.diff(bounds)),
        }
        hidden = model.encode(**on_device(inputs, device))
        next_ids = torch.from_numpy(np.concatenate([window[1:] for window, _ in waiting])).to(device)
        at = torch.from_numpy(asked).to(device)
        total += float(vocabulary_loss(hidden[at], model.word.weight, None, next_ids[at]))
        waiting.clear()

    for document in range(len(documents)):
        tokens = np.concatenate([[end_id], documents.tokens(document)]).astype(np.int64)
        pieces += len(tokens) - 1
        for window in windows(tokens, seq_len):
            waiting.append(window)
            if len(waiting) == _BATCH:
                flush()
    if waiting:
        flush()
    return total / pieces, pieces


def windows(tokens: NDArray[np.int64], seq_len: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Cut a document so that each of its pieces but the first is predicted once.

    Yields:
        (window, first): up to seq_len + 1 pieces, of which those from index first + 1 on are to be predicted.
    """
    start, predicted = 0, 1
    while predicted < len(tokens):
        stop = min(start + seq_len + 1, len(tokens))
        yield tokens[start:stop], predicted - start - 1
        predicted = stop
        start += seq_len // 2


def unigram_cross_entropy(documents: Documents, counts: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats a piece, over the same pieces, of a model that only knows how frequent each is.

    Args:
        counts: int64 (vocabulary,), of the training text.
    """
    return unigram_loss(counts, np.concatenate([documents.tokens(i) for i in range(len(documents))]))
