"""BLiMP (Warstadt et al. 2020): whether a model prefers an acceptable sentence to an unacceptable one."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from multihop.data_prep.tokenizers.tokenizer import Tokenizer
from multihop.eval.tasks.zero_shot_sets import Pair
from multihop.eval.zero_shot.scoring import (
    BATCH_TOKENS,
    ZeroShotResult,
    accuracy_result,
    encode_continuations,
    encode_each,
    log_likelihoods,
    pseudo_log_likelihoods,
)
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.layers.model import Model


def evaluate_pairs(
    model: Model,
    tokenizer: Tokenizer,
    special_ids: dict[str, int],
    pairs: Sequence[Pair],
    batch_tokens: int = BATCH_TOKENS,
) -> ZeroShotResult:
    """Return the fraction of pairs whose good sentence is the more likely one; also by field, by term and by paradigm.

    A causal model is judged by a sentence's log-likelihood after an end token, a masked model by its
    pseudo-log-likelihood.

    Args:
        pairs: at least one pair.

    Raises:
        UserError: a sentence is longer than the model's positions.
    """
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    if FAMILIES[model.config.family].causal:
        texts = [encode_continuations(tokenizer, special_ids, "", [sentence])[0] for sentence in sentences]
        scores = np.array([each.value for each in log_likelihoods(model, texts, batch_tokens)])
    else:
        scores = pseudo_log_likelihoods(model, encode_each(tokenizer, sentences), special_ids, batch_tokens)
    correct = scores[::2] > scores[1::2]
    return accuracy_result(correct, _by_group(pairs, correct))


def _by_group(pairs: Sequence[Pair], correct: NDArray[np.bool_]) -> dict[str, float]:
    groups: dict[str, list[bool]] = defaultdict(list)
    for pair, hit in zip(pairs, correct.tolist(), strict=True):
        for name in (f"field {pair.field}", f"term {pair.term}", f"paradigm {pair.paradigm}"):
            groups[name].append(hit)
    return {name: float(np.mean(groups[name])) for name in sorted(groups)}
