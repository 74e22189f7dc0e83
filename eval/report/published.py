"""Published scores of models of the usual sizes, to print beside a run's scores."""

from typing import NamedTuple


class Published(NamedTuple):
    """A published score."""

    model: str
    layers: int
    hidden: int
    score: float
    """Score from 0 to 1; BLEU in points."""
    metric: str
    split: str
    source: str


_BERT = "Devlin et al. 2018, table 1"
_COMPACT = "google-research/bert, README"
_ALBERT = "Lan et al. 2020, table 2"
_GLUE_TEST = "GLUE test"
_DEV = "development"

_TRANSFORMER = "Vaswani et al. 2017, table 2"
_TRANSFORMERS = [
    Published(model, 6, hidden, score, "BLEU", f"WMT 2014, English to {language}", _TRANSFORMER)
    for model, hidden, scores in (("Transformer-base", 512, (27.3, 38.1)), ("Transformer-big", 1024, (28.4, 41.8)))
    for language, score in zip(("German", "French"), scores, strict=True)
]

_BERT_BASE = {
    "glue/mnli": (84.6, "accuracy"), "glue/qqp": (71.2, "F1"), "glue/qnli": (90.5, "accuracy"),
    "glue/sst2": (93.5, "accuracy"), "glue/cola": (52.1, "Matthews"), "glue/stsb": (85.8, "Spearman"),
    "glue/mrpc": (88.9, "F1"), "glue/rte": (66.4, "accuracy"),
}  # fmt: skip
_COMPACT_COLUMNS = ("glue/cola", "glue/sst2", "glue/mnli", "glue/qnli", "glue/rte")
_COMPACT_ROWS = {
    ("BERT-tiny", 2, 128): (0.0, 83.2, 70.2, 81.5, 57.2),
    ("BERT-mini", 4, 256): (0.0, 85.9, 74.8, 84.1, 57.9),
    ("BERT-small", 4, 512): (27.8, 89.7, 77.6, 86.4, 61.8),
    ("BERT-medium", 8, 512): (38.0, 89.6, 80.0, 87.7, 62.2),
}
_ALBERT_COLUMNS = (
    ("squad1", "SQuAD F1"), ("squad1", "exact match"), ("squad2", "SQuAD F1"), ("squad2", "exact match"),
    ("glue/mnli", "accuracy"), ("glue/sst2", "accuracy"), ("race", "accuracy"),
)  # fmt: skip
_ALBERT_ROWS = {
    ("ALBERT-base", 12, 768): (89.3, 82.3, 80.0, 77.1, 81.6, 90.3, 64.0),
    ("ALBERT-large", 24, 1024): (90.6, 83.9, 82.3, 79.4, 83.5, 91.7, 68.5),
    ("ALBERT-xlarge", 24, 2048): (92.5, 86.1, 86.1, 83.1, 86.4, 92.4, 74.8),
    ("ALBERT-xxlarge", 12, 4096): (94.1, 88.3, 88.1, 85.1, 88.0, 95.2, 82.3),
}


def _table() -> dict[str, list[Published]]:
    table: dict[str, list[Published]] = {}
    for task, (score, metric) in _BERT_BASE.items():
        table.setdefault(task, []).append(Published("BERT-base", 12, 768, score / 100, metric, _GLUE_TEST, _BERT))
    squad = "Devlin et al. 2018, table 2"
    for metric, score in (("SQuAD F1", 88.5), ("exact match", 80.8)):
        table.setdefault("squad1", []).append(Published("BERT-base", 12, 768, score / 100, metric, _DEV, squad))
    for size, compact in _COMPACT_ROWS.items():
        for task, score in zip(_COMPACT_COLUMNS, compact, strict=True):
            metric = "Matthews" if task == "glue/cola" else "accuracy"
            table[task].append(Published(*size, score / 100, metric, _GLUE_TEST, _COMPACT))
    for size, scores in _ALBERT_ROWS.items():
        for (task, metric), score in zip(_ALBERT_COLUMNS, scores, strict=True):
            table.setdefault(task, []).append(Published(*size, score / 100, metric, _DEV, _ALBERT))
    return table


PUBLISHED = _table()
"""Published scores by task; those of MNLI are of the matched set."""


def published_beside(task: str, metric: str, layers: object, hidden: object) -> list[Published]:
    """Return the published scores on a task of models with this many layers of this width.

    For BLEU these are the Transformer's scores on WMT 2014, for orientation, whatever the test set and the model are.
    """
    if metric == "BLEU":
        return _TRANSFORMERS
    return [entry for entry in PUBLISHED.get(task, []) if (entry.layers, entry.hidden) == (layers, hidden)]
