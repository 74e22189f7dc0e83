"""One number for each task of a run, to compare runs by."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from common.json_lines import Row
from eval.statistics.choose import asked_rows, choose


def median_scores(rows: Sequence[Row], section: dict[str, Any]) -> Iterator[tuple[str, int, float]]:
    """(name, step of the checkpoint, median over the seeds at the chosen settings) of each task's test scores.

    The name is "TASK METRIC", and "TASK METRIC random" from random weights. The step is 0 where there is none.

    Args:
        rows: of eval/results.jsonl.
        section: the recipe's `eval`.
    """
    for start, choice in choose(asked_rows(rows, section)).items():
        if choice.chosen.rows:
            name = f"{start.task} {choice.chosen.rows[0]['metric']}{' random' if start.init == 'random' else ''}"
            yield name, start.checkpoint_step or 0, median(choice.chosen.values)
