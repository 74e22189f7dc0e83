"""GLUE's files of predictions (gluebenchmark.com/faq): one TSV file for each official test set."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from multihop.common.errors import UserError
from multihop.eval.tasks.glue import NAMES, TASKS


def predictions_file(task_name: str, ids: Sequence[str], predictions: ArrayLike) -> str:
    """The content of a file of predictions: a header, then each example's index and prediction.

    Classes are spelled as in the task's training file, scores of STS-B have three decimals and are clipped to 0..5.

    Args:
        ids: the examples' official indexes, in the file's order.
        predictions: float64 (N,) or (N, 1): the class's index in `Task.labels`, or the score.

    Raises:
        UserError: the task has no leaderboard.
    """
    if task_name not in TASKS:
        raise UserError(f"task {task_name} has no leaderboard's file of predictions; these have: {', '.join(NAMES)}")
    values = TASKS[task_name].values
    numbers = np.asarray(predictions, np.float64).reshape(-1)
    assert len(numbers) == len(ids) and all(ids) and np.isfinite(numbers).all()
    cells = [values[int(n)] for n in numbers] if values else [f"{n:.3f}" for n in np.clip(numbers, 0.0, 5.0)]
    lines = ["index\tprediction", *(f"{index}\t{cell}" for index, cell in zip(ids, cells, strict=True))]
    return "".join(f"{line}\n" for line in lines)
