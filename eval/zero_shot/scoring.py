"""Texts as tokens, in windows where they are too long, and their log-likelihoods, in packed batches of a bounded number
of tokens."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.model.token_types import with_token_types
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.layers.model import Model
from multihop.pretrain.packed_tokens import pack_sequences

Ids = NDArray[np.int64]

BATCH_TOKENS = 8192
"""Tokens of one forward pass. A longer sequence is a batch of its own."""
_LOGITS_AT_ONCE = 2**25
"""Elements of a chunk of logits: 128 MiB of fp32."""


@dataclass(frozen=True)
class Query:
    """A sequence for one forward pass, and what is to be predicted from its hidden states."""

    ids: Ids
    """(T,)."""
    at: Ids
    """(M,): the positions whose hidden states predict."""
    targets: Ids
    """(M,): the tokens to predict at these positions."""
    excluded: Sequence[Collection[int]] = ()
    """The tokens that greedy decoding may not choose, for each target; empty: none for any."""
    masked: Ids | None = None
    """(K,): the positions of mask tokens, `at` among them; None: the model is causal."""


class Prediction(NamedTuple):
    """The answer to a query of M targets."""

    log_probabilities: NDArray[np.float64]
    """(M,), in nats."""
    greedy: NDArray[np.bool_]
    """(M,): whether the target has the highest probability of all tokens that are not excluded."""


@dataclass(frozen=True)
class Continuation:
    """Tokens, and those that they continue."""

    context: Sequence[int]
    """The tokens before, at least one: the end token if no text is before. Cut at its beginning if it is too long."""
    ids: Sequence[int]
    """The tokens of the continuation, at least one."""
    excluded: Sequence[Collection[int]] = ()
    """The excluded tokens, as in `Query`."""


class LogLikelihood(NamedTuple):
    """The likelihood of a continuation after its context."""

    value: float
    """The sum of its tokens' log-probabilities, in nats."""
    greedy: bool
    """Whether greedy decoding from the context produces exactly this continuation."""
    tokens: int


def log_likelihoods(
    model: Model, continuations: Sequence[Continuation], batch_tokens: int = BATCH_TOKENS
) -> list[LogLikelihood]:
    """Return the log-likelihood of each continuation under a causal model.

    Raises:
        UserError: the model is not causal, or a continuation alone exceeds its positions.
    """
    if not FAMILIES[model.config.family].causal:
        raise UserError(
            f"the likelihood of a continuation needs a causal model, but model.family={model.config.family}; "
            "remove the task"
        )
    limit = model.config.max_positions
    if long := [i for i, each in enumerate(continuations) if len(each.ids) > limit]:
        raise UserError(
            f"continuation {long[0] + 1} has {len(continuations[long[0]].ids):,} tokens, but the model has "
            f"max_positions={limit}; remove the task, or evaluate a model with more positions"
        )

    def query(each: Continuation) -> Query:
        assert len(each.context) and len(each.ids)
        ids = np.array([*each.context, *each.ids], np.int64)[-limit - 1 :]
        targets = ids[-len(each.ids) :]
        return Query(ids[:-1], np.arange(len(ids) - len(targets), len(ids)) - 1, targets, each.excluded)

    by_length = _longest_first([len(each.context) + len(each.ids) for each in continuations])
    scores: list[LogLikelihood | None] = [None] * len(continuations)
    for index, each in zip(
        by_length, predict(model, (query(continuations[i]) for i in by_length), batch_tokens), strict=True
    ):
        scores[index] = LogLikelihood(float(each.log_probabilities.sum()), bool(each.greedy.all()), len(each.greedy))
    return [score for score in scores if score is not None]


def pseudo_log_likelihoods(
    model: Model,
    sentences: Sequence[Sequence[int]],
    special_ids: dict[str, int],
    batch_tokens: int = BATCH_TOKENS,
) -> NDArray[np.float64]:
    """Return the pseudo-log-likelihood of each sentence under a masked model (Salazar et al. 2020, section 2, equation
    1).

    The sum over a sentence's tokens of the log-probability of each, given all others, with that token masked.

    Args:
        sentences: tokens without [CLS] and [SEP], which are put around them and are not scored.
        special_ids: special ids of the tokenizer, with cls, sep and mask.

    Returns:
        float64 (sentences,), in nats.

    Raises:
        UserError: the model is not a masked model, or a sentence exceeds its positions.
    """
    if not FAMILIES[model.config.family].predicts_masks:
        raise UserError(
            f"pseudo-log-likelihoods need a masked model, but model.family={model.config.family}; remove the task"
        )
    limit = model.config.max_positions
    if long := [i for i, each in enumerate(sentences) if len(each) + 2 > limit]:
        raise UserError(
            f"sentence {long[0] + 1} has {len(sentences[long[0]]):,} tokens, but the model has max_positions={limit}, "
            "of which [CLS] and [SEP] take two; remove the task, or evaluate a model with more positions"
        )

    def queries(index: int) -> Iterator[Query]:
        ids = np.array(sentences[index], np.int64)
        starts = np.ones(len(ids), bool)
        return masked_windows(ids, starts, special_ids, max(1, len(ids)) + 2, FAMILIES[model.config.family].cls_last)

    by_length = _longest_first(list(map(len, sentences)))
    answers = predict(model, chain.from_iterable(map(queries, by_length)), batch_tokens)
    scores = np.zeros(len(sentences))
    for index in by_length:
        scores[index] = sum(float(each.log_probabilities[0]) for each in islice(answers, len(sentences[index])))
    return scores


def predict(model: Model, queries: Iterable[Query], batch_tokens: int = BATCH_TOKENS) -> Iterator[Prediction]:
    """Yield the answers, in the order of the queries, which are packed into batches in this order: sort them by
    length."""
    model.eval()
    batch: list[Query] = []
    tokens = 0
    for query in queries:
        if batch and tokens + len(query.ids) > batch_tokens:
            yield from _predict(model, batch)
            batch, tokens = [], 0
        batch.append(query)
        tokens += len(query.ids)
    if batch:
        yield from _predict(model, batch)


def _predict(model: Model, batch: list[Query]) -> list[Prediction]:
    lengths = [len(query.ids) for query in batch]
    starts = np.cumsum([0, *lengths[:-1]])
    at = np.concatenate([query.at + start for query, start in zip(batch, starts, strict=True)])
    targets = np.concatenate([query.targets for query in batch])
    excluded = list(chain.from_iterable(query.excluded or [()] * len(query.targets) for query in batch))
    masked = [query.masked + start for query, start in zip(batch, starts, strict=True) if query.masked is not None]
    rows = max(1, _LOGITS_AT_ONCE // model.word.num_embeddings)
    log_probabilities, greedy = [], []
    device = next(model.parameters()).device
    with torch.no_grad():
        packed = packed_to_device(pack_sequences([query.ids for query in batch]), device)
        packed, indices = with_token_types(FAMILIES[model.config.family], packed), torch.from_numpy(at).to(device)
        if masked:
            hidden = model.encode_masked(packed, torch.from_numpy(np.concatenate(masked)).to(device), indices)
        else:
            hidden = model.encode(packed, token_indices=indices)
        wanted = torch.from_numpy(targets).to(device)[:, None]
        for first in range(0, len(at), rows):
            part = slice(first, first + rows)
            logits = model.lm_head(hidden[part]).float()
            log_probabilities.append(logits.gather(1, wanted[part])[:, 0] - logits.logsumexp(-1))
            for row, tokens in enumerate(excluded[part]):
                if tokens:
                    logits[row, list(tokens)] = -torch.inf
            greedy.append(logits.argmax(-1) == wanted[part, 0])
    bounds = np.cumsum([len(query.targets) for query in batch])[:-1]
    values = np.split(torch.cat(log_probabilities).double().cpu().numpy(), bounds)
    hits = np.split(torch.cat(greedy).cpu().numpy(), bounds)
    return [Prediction(*each) for each in zip(values, hits, strict=True)]


def _longest_first(lengths: list[int]) -> list[int]:
    """Return indexes, the longest sequence first: batches need no padding, and the one that needs most memory comes
    first."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def encode_each(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    assert texts
    ids, lengths = tokenizer.encode(texts)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def encode_continuations(
    tokenizer: Tokenizer, special_ids: dict[str, int], context: str, continuations: Sequence[str]
) -> list[Continuation]:
    """Encode a text and its possible continuations, each with the space that separates the two if there is one.

    Context and continuation are encoded together. Tokens that all have in common with the context alone, after an end
    token, are the context: where a continuation changes the context's last token, that token is scored for all of them,
    so that their likelihoods remain comparable.

    Args:
        special_ids: special ids of the run's tokenizer, with end.
    """
    alone, *together = encode_each(tokenizer, [context, *(context + each for each in continuations)])
    shared = min(sum(1 for _ in takewhile(_equal, zip(alone, each, strict=False))) for each in together)
    # Text for which the tokenizer has no token at all is as unlikely as an unknown one, not certain.
    nothing = [special_ids.get("unk", special_ids["end"])]
    before = [special_ids["end"], *alone[:shared]]
    return [Continuation(before, each[shared:] or nothing) for each in together]


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def windows(tokens: Ids, seq_len: int, stride: int) -> Iterator[Query]:
    """Cut a text so that each of its tokens but the first is predicted once.

    Each token is predicted from at least `seq_len - stride + 1` tokens before it where the text has as many.

    Args:
        tokens: int64 (T,).
        seq_len: tokens of a window.
        stride: distance between the beginnings of two windows, from 1 to `seq_len`.

    Yields:
        Queries, of which each predicts the tokens that the one before does not reach, in the order of the text.
    """
    assert 1 <= stride <= seq_len
    start, predicted = 0, 1
    while predicted < len(tokens):
        stop = min(start + seq_len + 1, len(tokens))
        yield Query(tokens[start : stop - 1], np.arange(predicted - 1, stop - 1) - start, tokens[predicted:stop])
        predicted = stop
        start += stride


def masked_windows(
    tokens: Ids, starts: NDArray[np.bool_], special_ids: dict[str, int], seq_len: int, cls_last: bool
) -> Iterator[Query]:
    """Mask each token of a text in turn, with the rest of its word, which would give it away (Kauf and Ivanova 2023,
    PLL-word-l2r), in a window that has it in the middle.

    Args:
        tokens: int64 (T,), without [CLS] and [SEP], which are put around each window.
        starts: bool (T,), whether each token begins a word.
        seq_len: tokens of a window, [CLS] and [SEP] included; at least 3.
        cls_last: whether a window ends with [SEP] [CLS], as `Family.cls_last`.
    """
    width = seq_len - 2
    assert width >= 1
    cls, sep = [special_ids["cls"]], [special_ids["sep"]]
    before, after = ([], sep + cls) if cls_last else (cls, sep)
    ends = np.flatnonzero(np.append(starts[1:], True)) + 1
    end_of = ends[np.searchsorted(ends, np.arange(len(tokens)), side="right")] if len(tokens) else ends
    for at in range(len(tokens)):
        first = max(0, min(at - width // 2, len(tokens) - width))
        ids = np.concatenate([before, tokens[first : first + width], after]).astype(np.int64)
        masked = np.arange(at, min(end_of[at], first + width)) - first + len(before)
        ids[masked] = special_ids["mask"]
        yield Query(ids, masked[:1], tokens[at : at + 1], masked=masked)


@dataclass(frozen=True)
class ZeroShotResult:
    """A value, and the numbers per example that it is computed from."""

    value: float
    other_metrics: dict[str, float]
    statistics: NDArray[np.float64]
    """(examples, 2). Accuracy: [1 if correct else 0, 1]. Perplexity: [negative log-likelihood in nats, count]. The
    column sums determine `value`, so that examples can be resampled."""


def accuracy_result(correct: NDArray[np.bool_], other_metrics: dict[str, float]) -> ZeroShotResult:
    """Return the fraction of examples that are correct.

    Args:
        correct: bool (examples,), at least one.
    """
    statistics = np.stack([correct, np.ones_like(correct)], axis=1).astype(np.float64)
    return ZeroShotResult(float(correct.mean()), other_metrics, statistics)
