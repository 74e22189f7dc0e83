"""A model's translations of a test set, and their scores."""

from typing import Any

from eval.inference.beam_search import Search
from eval.inference.trained_model import TrainedModel
from eval.inference.translate import translate
from eval.tasks.task import Task
from eval.translation.bleu import scores, statistics


def evaluate_translation(trained: TrainedModel, task: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate the task's sources, and compare with its references.

    Beside BLEU and chrF stands what copying the source gives, the floor of every system.

    Returns:
        What the trial's row says: value, other metrics, signatures. And its predictions: for each sentence what BLEU is
        computed from, and its translation.

    Raises:
        ValueError: the model does not translate, or sacrebleu is not installed.
    """
    sources, references = ([example.texts[side] for example in task.test] for side in (0, 1))
    copied, _, signatures = scores(sources, references)
    search = Search(int(task.settings["beams"]), float(task.settings["length_penalty"]))
    translations = [each.text for each in translate(trained, sources, search)]
    value, others, _ = scores(translations, references)
    row = {
        "value": value,
        "dev_value": None,
        "other_metrics": {**others, "BLEU of the source": copied},
        "signatures": signatures,
        "examples": {"test": len(references)},
        "reported_on": "test",
    }
    return row, {"statistics": statistics(translations, references).tolist(), "predicted": translations}
