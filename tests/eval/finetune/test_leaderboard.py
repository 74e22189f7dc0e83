"""The files that GLUE's leaderboard accepts."""

import numpy as np
import pytest

from multihop.common.errors import UserError
from multihop.eval.finetune.official_files import predictions_file


@pytest.mark.parametrize(
    ("task", "predictions", "cells"),
    [
        ("glue/cola", [0.0, 1.0], ["0", "1"]),
        ("glue/wnli", [1, 0], ["1", "0"]),
        ("glue/rte", np.array([[1.0], [0.0]]), ["not_entailment", "entailment"]),
        ("glue/mnli", [2, 1], ["contradiction", "neutral"]),
        ("glue/stsb", [-0.3, 5.75], ["0.000", "5.000"]),
        ("glue/stsb", [2.34567, 4], ["2.346", "4.000"]),
    ],
)
def test_predictions_are_spelled_as_the_leaderboard_expects(
    task: str, predictions: list[float], cells: list[str]
) -> None:
    content = predictions_file(task, ["7", "8"], predictions)
    assert content == f"index\tprediction\n7\t{cells[0]}\n8\t{cells[1]}\n"


def test_a_task_without_a_leaderboard_is_refused() -> None:
    with pytest.raises(
        UserError, match="task conll2003 has no leaderboard's file of predictions; these have: glue/cola"
    ):
        predictions_file("conll2003", ["0"], [1.0])
