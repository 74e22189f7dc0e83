"""Translation tasks in the report of several runs, beside their scores: chrF, the floors, BLEU by length."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from multihop.common.json_lines import Row
from multihop.eval.metrics.bleu import CLASSES, bleu_by_length, sentences_by_length
from multihop.eval.report.compared_runs import ComparedRun
from multihop.eval.statistics.formatting import spread
from multihop.eval.statistics.read_predictions import read_predictions


@dataclass(frozen=True)
class ByLength:
    """BLEU of several runs by the length of the source, on one test set."""

    labels: list[str]
    """Range of words and number of sentences of each class that has sentences."""
    scores: dict[str, list[list[float]]]
    """Scores by the name of the run: for each class, the score of each trial."""

    @property
    def lines(self) -> list[list[str]]:
        """A line of the table for each run: its name, and the spread over its trials in each class."""
        return [[name, *map(spread, classes)] for name, classes in self.scores.items()]

    @property
    def medians(self) -> dict[str, list[float]]:
        """The medians over the trials of each run, in each class."""
        return {name: [median(values) for values in classes] for name, classes in self.scores.items()}


def by_length(runs: Sequence[ComparedRun], task: str) -> ByLength | None:
    """Return BLEU by length of the runs with the same test pairs as the first; None if no trial has source lengths.

    Raises:
        UserError: a file of predictions is damaged.
    """
    sources, tested = [], ""
    scores: dict[str, list[list[float]]] = {}
    for run in runs:
        predictions = [(row, read_predictions(folder, row)) for folder, row in run.trials(task, "pretrained")]
        tables_of = [
            (row["test_fingerprint"], content)
            for row, content in predictions
            if content and content.get("source_words")
        ]
        if tables_of and not tested:
            tested, sources = tables_of[0][0], tables_of[0][1]["source_words"]
        tables = [bleu_by_length(content) for fingerprint, content in tables_of if fingerprint == tested]
        if tables:
            scores[run.name] = [list(values) for values in zip(*tables, strict=True)]
    if not scores:
        return None
    counts = sentences_by_length(sources)
    used = [number for number, count in enumerate(counts) if count]
    labels = [f"{CLASSES[number]} ({counts[number]:,})" for number in used]
    return ByLength(labels, {name: [classes[number] for number in used] for name, classes in scores.items()})


def other_metrics(runs: Sequence[ComparedRun], task: str) -> tuple[list[str], list[list[str]]]:
    """Return the names of the metrics besides BLEU, and for each run its name and each metric's spread over trials."""
    rows = {run.name: [row["other_metrics"] for _, row in run.trials(task, "pretrained")] for run in runs}
    names = list(dict.fromkeys(name for trials in rows.values() for each in trials for name in each))
    return names, [
        [run, *(spread([each[name] for each in trials if name in each]) for name in names)]
        for run, trials in rows.items()
        if trials
    ]


def signatures(rows: Sequence[Row]) -> list[str]:
    """Return the signatures of sacrebleu, each once: they say how the metrics were computed."""
    return list(dict.fromkeys(text for row in rows for text in (row.get("signatures") or {}).values()))
