"""The perplexity of a causal model on held-out documents, and that of a unigram model on the same."""

from itertools import chain

import numpy as np
from numpy.typing import NDArray

from multihop.data_prep.dataset.shards import Documents
from multihop.eval.zero_shot.scoring import predict, windows
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.run.heldout import unigram_loss


def cross_entropy(model: Model, documents: Documents, end_id: int, seq_len: int) -> tuple[float, int]:
    """Mean cross-entropy over all documents in nats per token, and the number of tokens.

    Each document is read from its beginning, after an end token. One longer than `seq_len` is read in windows that
    overlap by half: every token is predicted exactly once, from at least `seq_len // 2` tokens before it where the
    document has as many.

    Args:
        model: of a causal family.
    """
    longest_first = np.argsort(-documents.lengths, kind="stable").tolist()
    queries = chain.from_iterable(
        windows(np.concatenate([[end_id], documents.tokens(i)]).astype(np.int64), seq_len, max(1, seq_len // 2))
        for i in longest_first
    )
    log_likelihood, tokens = 0.0, 0
    for each in predict(model, queries):
        log_likelihood += float(each.log_probabilities.sum())
        tokens += len(each.greedy)
    return -log_likelihood / tokens, tokens


def unigram_cross_entropy(documents: Documents, counts: NDArray[np.int64]) -> float:
    """Mean cross-entropy in nats per token, over the same tokens, of the unigram model of the training text.

    Args:
        counts: int64 (V,), of the training text.
    """
    return unigram_loss(counts, np.concatenate([documents.tokens(i) for i in range(len(documents))]))
