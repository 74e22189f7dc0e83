"""Decodes what the states of a CTC model emit (Graves et al. 2006, section 3.2): the best path, or prefix beam search.

The best path takes the likeliest emission of each state, which need not give the likeliest target. Prefix beam search
sums over the paths of each target: it keeps the likeliest prefixes of targets from state to state, each with the
probability of its paths that end in a blank and of those that end in its last token (Hannun et al. 2014, algorithm 1,
without a language model). With as many beams as there are prefixes it is exact.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from multihop.eval.inference.beam_search import Hypothesis
from multihop.pretrain.engine.inputs import packed_to_device
from multihop.pretrain.models.layers.ctc import CtcTranslator
from multihop.pretrain.packed_tokens import pack_sequences

Float = NDArray[np.float64]


@torch.inference_mode()
def ctc_search(
    model: CtcTranslator, sources: Sequence[Sequence[int]], blank: int, beams: int
) -> list[list[Hypothesis]]:
    """Return at most `beams` hypotheses for each sentence, the best first; with 1 the best path's.

    A hypothesis's score is its log probability, in nats; of the best path, that of the path.

    Args:
        sources: tokens of each sentence, its end token included.
        blank: the token that stands for the blank.
    """
    packed = packed_to_device(pack_sequences(sources), model.word.weight.device)
    emissions = model.emission_log_probabilities(model.encode(packed)).double().cpu().numpy()
    each = np.split(emissions, np.cumsum([len(source) for source in sources])[:-1])
    if beams == 1:
        return [[best_path(log_probabilities, blank)] for log_probabilities in each]
    return [prefix_beam_search(log_probabilities, blank, beams) for log_probabilities in each]


def collapse(path: Sequence[int], blank: int) -> list[int]:
    """Return the target of a path: repetitions are merged, and then blanks removed."""
    merged = [token for at, token in enumerate(path) if at == 0 or token != path[at - 1]]
    return [token for token in merged if token != blank]


def best_path(log_probabilities: Float, blank: int) -> Hypothesis:
    """Return the target of the likeliest path, given log probabilities (T, V) of emissions."""
    path = log_probabilities.argmax(1)
    return Hypothesis(collapse(path.tolist(), blank), float(log_probabilities.max(1).sum()))


def prefix_beam_search(log_probabilities: Float, blank: int, beams: int) -> list[Hypothesis]:
    """Return the likeliest targets, the best first, given log probabilities (T, V) of emissions."""
    prefixes: list[tuple[int, ...]] = [()]
    with_blank, without_blank = np.zeros(1), np.full(1, -np.inf)
    """float64 (K,): log probabilities of each prefix's paths that end in a blank, and of those that do not."""
    for emitted in log_probabilities:
        whole = np.logaddexp(with_blank, without_blank)
        extended = whole[:, None] + emitted
        extended[:, blank] = -np.inf
        stays_with_blank, stays_without = whole + emitted[blank], np.full(len(prefixes), -np.inf)
        for row, prefix in enumerate(prefixes):
            if prefix:  # a repetition stays the same prefix, unless a blank is between the two
                extended[row, prefix[-1]] = with_blank[row] + emitted[prefix[-1]]
                stays_without[row] = without_blank[row] + emitted[prefix[-1]]
        rows = {prefix: row for row, prefix in enumerate(prefixes)}
        for row, prefix in enumerate(prefixes):
            parent = rows.get(prefix[:-1]) if prefix else None
            if parent is not None:
                stays_without[row] = np.logaddexp(stays_without[row], extended[parent, prefix[-1]])
                extended[parent, prefix[-1]] = -np.inf
        scores = np.concatenate([np.logaddexp(stays_with_blank, stays_without), extended.ravel()])
        best = np.argsort(-scores, kind="stable")[:beams]
        best = best[scores[best] > -np.inf]
        new_prefixes, new_with, new_without = [], [], []
        for candidate in best.tolist():
            if candidate < len(prefixes):
                new_prefixes.append(prefixes[candidate])
                new_with.append(stays_with_blank[candidate])
                new_without.append(stays_without[candidate])
            else:
                row, token = divmod(candidate - len(prefixes), extended.shape[1])
                new_prefixes.append((*prefixes[row], token))
                new_with.append(-np.inf)
                new_without.append(extended[row, token])
        prefixes, with_blank, without_blank = new_prefixes, np.array(new_with), np.array(new_without)
    whole = np.logaddexp(with_blank, without_blank)
    order = np.argsort(-whole, kind="stable").tolist()
    return [Hypothesis(list(prefixes[row]), float(whole[row])) for row in order]
