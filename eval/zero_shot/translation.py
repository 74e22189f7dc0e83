"""A model's translations of a test set, and their scores."""

from collections import Counter
from collections.abc import Sequence
from operator import eq
from typing import Any

import numpy as np

from multihop.data_prep.rules.pairs import clean_side
from multihop.eval.inference.beam_search import Search
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.inference.translate import translate
from multihop.eval.metrics.bleu import scores, statistics
from multihop.eval.tasks.task import Task


def evaluate_translation(trained: TrainedModel, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate the task's sources, and compare with its references.

    Other metrics are those of two baselines that cannot translate: a copy of the source, and `frequent_words` for every
    source.

    Returns:
        The trial's fields of the row: value, other metrics, signatures. And its predictions: for each sentence the
        counts for BLEU and the words of its source, or whether it is the reference; and its translation.

    Raises:
        UserError: the model does not translate, or sacrebleu is not installed.
    """
    # The training pairs were cleaned in the same way, but for data.clean.fix_mojibake.
    sources, references = ([clean_side(example.texts[side]) for example in task.test] for side in (0, 1))
    baselines: dict[str, float] = {}
    for name, answers in (("the source", sources), ("frequent words", [frequent_words(references)] * len(references))):
        bleu, more, _ = scores(answers, references)
        baselines |= {f"BLEU of {name}": bleu, f"chrF of {name}": more["chrF"]}
    search = Search(int(task.settings["beams"]), float(task.settings["length_penalty"]))
    translations = [clean_side(each.text) for each in translate(trained, sources, search)]
    value, others, signatures = scores(translations, references)
    matches = [float(text == reference) for text, reference in zip(translations, references, strict=True)]
    sums = statistics(translations, references)
    further = {"source_words": [len(source.split()) for source in sources]}
    if task.metric == "exact match":
        others = {"BLEU": value, **others}
        value, sums, further = float(np.mean(matches)), np.array([[each, 1.0] for each in matches]), {}
        baselines = {"exact match of the source": float(np.mean([*map(eq, sources, references)])), **baselines}
    row = {
        "value": value,
        "dev_value": None,
        "other_metrics": {**others, **baselines},
        "signatures": signatures,
        "examples": {"test": len(references)},
        "reported_on": "test",
    }
    return row, {
        "statistics": sums.tolist(),
        **further,
        "predicted": translations,
    }


def frequent_words(references: Sequence[str]) -> str:
    """Return the output of a system that reads no source: the most frequent words of the references, each once, the
    most frequent first, as many as a reference has on average. It knows more of the test set than a count over training
    pairs would. Spaces separate words.
    """
    counts = Counter(word for reference in references for word in reference.split())
    return " ".join(word for word, _ in counts.most_common(round(counts.total() / len(references))))
