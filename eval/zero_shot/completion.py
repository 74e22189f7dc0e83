"""A causal model's completions of sources, and their scores, after COMET (Bosselut et al. 2019, section 4.1)."""

from collections.abc import Sequence
from math import exp
from typing import Any

import numpy as np

from multihop.data_prep.rules.pairs import clean_side
from multihop.eval.inference.beam_search import Search
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import translate
from multihop.eval.metrics.bleu import mean_bleu_2
from multihop.eval.tasks.task import Example, Task
from multihop.eval.zero_shot.scoring import Continuation, encode_each, log_likelihoods
from multihop.pretrain.objectives.completion import prompt_tokens

Pair = tuple[str, str]


def evaluate_completion(trained: TrainedModel, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score the targets of the task's pairs, and complete each of its sources once.

    The value is the perplexity of the targets, per token, their end tokens included. Other metrics are those of the
    completions: BLEU-2 against all targets of the source, and the shares that are novel; see `novelty`.

    Returns:
        The trial's fields of the row: value, other metrics. And its predictions: for each pair minus its log-likelihood
        and its tokens, and for each source its completion.

    Raises:
        UserError: a target is longer than the model's positions, or sacrebleu is not installed.
    """
    # The training pairs were cleaned in the same way, but for data.clean.fix_mojibake.
    pairs, train = _cleaned(task.test), _cleaned(task.train)
    end = trained.special_ids["end"]
    sources, targets = (encode_each(trained.tokenizer, [pair[side] for pair in pairs]) for side in (0, 1))
    scores = log_likelihoods(
        trained.model,
        [
            Continuation(prompt_tokens(source, end), [*target, end])
            for source, target in zip(sources, targets, strict=True)
        ],
    )
    statistics = np.array([[-each.value, each.tokens] for each in scores], np.float64)
    loss, tokens = statistics.sum(0).tolist()

    references: dict[str, list[str]] = {}
    for source, target in pairs:
        references.setdefault(source, []).append(target)
    search = Search(int(task.settings["beams"]), float(task.settings["length_penalty"]))
    made = [clean_side(each.text) for each in translate(trained, list(references), search)]
    row = {
        "value": exp(loss / tokens),
        "dev_value": None,
        "other_metrics": {
            "BLEU-2": mean_bleu_2(made, list(references.values())),
            **novelty(list(zip(references, made, strict=True)), train),
            "sources": float(len(references)),
            "tokens": tokens,
        },
        "examples": {"test": len(pairs)},
        "reported_on": "test",
    }
    return row, {"statistics": statistics.tolist(), "sources": list(references), "predicted": made}


def novelty(made: Sequence[Pair], train: Sequence[Pair]) -> dict[str, float]:
    """Return the shares of made pairs that are not among the training pairs, and whose targets are not among their
    targets; and the share of different made targets that are not (N/T sro, N/T o and N/U o of Bosselut et al. 2019).
    An empty target is not novel; the share of these is returned too.
    """
    known_pairs, known_targets = set(train), {target for _, target in train}
    different = {target for _, target in made}
    return {
        "novel tuples": sum(bool(pair[1]) and pair not in known_pairs for pair in made) / len(made),
        "novel objects": sum(bool(target) and target not in known_targets for _, target in made) / len(made),
        "novel unique objects": len(different - known_targets - {""}) / len(different),
        "empty completions": sum(not target for _, target in made) / len(made),
    }


def _cleaned(examples: Sequence[Example]) -> list[Pair]:
    return [(clean_side(example.texts[0]), clean_side(example.texts[1])) for example in examples]
