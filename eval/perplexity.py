"""Zero-shot: the perplexity of a causal model on held-out documents, beside a model that knows less."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from data_prep.shards import Documents
from pretrain.models.gpt2 import GPT2
from pretrain.references import unigram_loss

_BATCH = 16


@torch.no_grad()
def cross_entropy(model: GPT2, documents: Documents, end_id: int, seq_len: int) -> tuple[float, int]:
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
        lengths = np.array([len(window) - 1 for window, _ in waiting], np.int64)
        inputs = np.zeros((len(waiting), int(lengths.max())), np.int64)
        wanted = np.full_like(inputs, -100)
        for line, (window, first) in enumerate(waiting):
            inputs[line, : lengths[line]] = window[:-1]
            wanted[line, first : lengths[line]] = window[first + 1 :]
        ids, targets = torch.from_numpy(inputs).to(device), torch.from_numpy(wanted).to(device)
        hidden = model.encode(ids, None, torch.from_numpy(lengths).to(device))
        asked = targets.flatten() != -100
        logits = model.logits(hidden.flatten(0, 1)[asked])
        total += float(F.cross_entropy(logits.float(), targets.flatten()[asked], reduction="sum"))
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
