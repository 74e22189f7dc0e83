"""The perplexity of a model on a text file (WikiText, the Penn Treebank, any other text) and on held-out text.

Tokenizers differ in how many tokens they cut a text into. So the negative log-likelihood of the whole text is divided
by the official number of words, whatever the model's tokens are, and by the bytes of the file (Radford et al. 2019,
section 3.1). Of a masked model it is the pseudo-log-likelihood (Salazar et al. 2020), with the rest of a token's word
masked too (Kauf and Ivanova 2023): a word of several tokens is then predicted from left to right, as in a causal model,
and not from its own parts, which would favor vocabularies that split more. The number of masks still tells how many
tokens a word has.
"""

from collections.abc import Sequence
from itertools import chain, islice
from math import exp, log

import numpy as np
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.data_prep.dataset.shards import Documents
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.tasks.running_text import PSEUDO, UNIT_WORDS, Text
from multihop.eval.zero_shot.scoring import BATCH_TOKENS, ZeroShotResult, encode_each, masked_windows, predict, windows
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.run.heldout import unigram_loss

_LARGEST_EXPONENT = 700
MOST_MASKED = 50_000
"""Tokens of a text for a masked model, at most."""


def _units(blocks: NDArray[np.float64], documents: Sequence[int]) -> NDArray[np.float64]:
    """Return sums over neighboring blocks of a document, of about `UNIT_WORDS` words each.

    Args:
        blocks: (blocks, 2), whose second column is the number of words.
        documents: the number of blocks of each document.
    """
    first = np.cumsum([0, *documents[:-1]])
    words = np.concatenate([[0.0], np.cumsum(blocks[:, 1])])
    owner = np.repeat(np.arange(len(documents)), documents)
    number = (words[:-1] - words[first[owner]]) // UNIT_WORDS
    begins = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(number, prepend=-1).astype(bool))
    return np.add.reduceat(blocks, begins, axis=0)


def evaluate_perplexity(
    model: Model,
    tokenizer: Tokenizer,
    special_ids: dict[str, int],
    text: Text,
    seq_len: int,
    stride: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> ZeroShotResult:
    """Return the perplexity per word by the text's convention, of a masked model the pseudo-perplexity; other metrics
    per token and per byte, bits per byte, counts.

    For a causal model each document is one sequence after an end token, read in overlapping windows. A masked model
    takes a forward pass for each token, over a window with that token in its middle.

    Args:
        special_ids: special ids of the run's tokenizer, with end, or with cls, sep and mask.
        seq_len: tokens of a window, at most; the model's positions if these are fewer.
        stride: tokens between the beginnings of two windows of a causal model; None: half a window.

    Returns:
        `statistics` has a row for about `UNIT_WORDS` words of a document: their negative log-likelihood in nats, and
        their number.

    Raises:
        UserError: the stride exceeds the window, or the text has so few words that the perplexity per word is not a
            floating-point number.
    """
    seq_len = min(seq_len, model.config.max_positions)
    stride = max(1, seq_len // 2) if stride is None else stride
    if not 1 <= stride <= seq_len:
        raise UserError(f"a stride of {stride} leaves out tokens of windows of {seq_len}; give 1 to {seq_len}")
    encoded = encode_each(tokenizer, text.blocks)
    causal, rest = FAMILIES[model.config.family].causal, iter(encoded)
    documents = [np.array([*chain.from_iterable(islice(rest, count))], np.int64) for count in text.documents]
    if not causal and (tokens := sum(map(len, encoded))) > MOST_MASKED:
        raise UserError(
            f"the text has {tokens:,} tokens, and a masked model takes a forward pass for each; give a text of at most "
            f"{MOST_MASKED:,} tokens"
        )
    if not causal and seq_len < 3:
        raise UserError(f"windows of {seq_len} tokens have no room for one beside [CLS] and [SEP]; raise eval.seq_len")
    if not any(encoded):
        raise UserError("the tokenizer has no token for anything in the text; evaluate on a text of its language")
    block_of = np.repeat(np.arange(len(encoded)), list(map(len, encoded)))
    if causal:
        end = np.array([special_ids["end"]], np.int64)
        queries = chain.from_iterable(windows(np.concatenate([end, ids]), seq_len, stride) for ids in documents)
    else:
        starts = np.array([tokenizer.begins_word(i) for i in range(tokenizer.vocab_size)])
        cls_last = FAMILIES[model.config.family].cls_last
        queries = chain.from_iterable(
            masked_windows(ids, starts[ids], special_ids, seq_len, cls_last) for ids in documents
        )
    answers = predict(model, queries, batch_tokens)
    losses = -np.concatenate([each.log_probabilities for each in answers])
    of_blocks = np.stack([np.bincount(block_of, losses, len(encoded)), np.array(text.words, np.float64)], axis=1)
    statistics = _units(of_blocks, text.documents)
    total, words = statistics.sum(0).tolist()
    if total > _LARGEST_EXPONENT * words:
        raise UserError(
            f"the text has {words:,.0f} words in {text.bytes:,} bytes, too few for a perplexity per word; words are "
            "separated by whitespace"
        )
    is_plain = text.convention == "text"
    counted = "words" if is_plain else "words and line ends"
    read = "" if is_plain else f"{'detokenized' if text.detokenized else 'official'} text, "
    kind = "" if causal else PSEUDO
    other_metrics = {
        f"{read}{kind}perplexity per token": exp(total / len(losses)),
        f"{kind}perplexity per byte": exp(total / text.bytes),
        f"{kind}bits per byte": total / text.bytes / log(2),
        counted: words,
        "tokens": float(len(losses)),
        "bytes": float(text.bytes),
    }
    if "unk" in special_ids:
        other_metrics["unknown tokens"] = float(sum((ids == special_ids["unk"]).sum() for ids in documents))
    return ZeroShotResult(exp(total / words), other_metrics, statistics)


def cross_entropy(model: Model, documents: Documents, end_id: int, seq_len: int) -> tuple[float, int]:
    """Return the mean cross-entropy over held-out documents in nats per token, and the number of tokens.

    Each document is read from its beginning, after an end token. One longer than `seq_len` is read in windows that
    overlap by half: every token is predicted exactly once, from at least `seq_len // 2` tokens before it where the
    document has as many.

    Args:
        model: model of a causal family.
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
    """Return the mean cross-entropy in nats per token, over the same tokens, of the unigram model of the training text.

    Args:
        counts: int64 (V,), token counts of the training text.
    """
    return unigram_loss(counts, np.concatenate([documents.tokens(i) for i in range(len(documents))]))
