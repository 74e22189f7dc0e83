"""Runs a trial: one trial in, one row of results.jsonl and the predictions behind it out.

Torch and the modules that need it are imported in functions: the driver imports this to send trials to workers.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

from multihop.common.json_lines import Row
from multihop.eval.trials.trial import Trial, describe_trial, failed_row


@dataclass(frozen=True)
class Outcome:
    """The result of a trial."""

    row: Row
    predictions: dict[str, Any] | None
    """The content of the file of predictions (`multihop.eval.trials.write_predictions`); None for a failed trial and
    for the perplexity of held-out text."""


def run_trial(trial: Trial) -> Outcome:
    """Run a trial on this machine: on its GPU where torch finds one, else on `trial.threads` cores.

    Returns:
        The outcome. The row's status is "failed", with the reason, if a loss or a score became non-finite: the same
        trial would fail again.

    Raises:
        UserError: the data, the task's files or the checkpoint are missing, or differ from those of the plan.
    """
    import torch

    from multihop.eval.finetune.loop import NonFiniteLossError

    started = time.monotonic()
    torch.set_num_threads(trial.threads)
    try:
        result, predictions = _run(trial)
        _check_finite(result)
    except NonFiniteLossError as error:
        return Outcome(failed_row(trial, str(error), time.monotonic() - started), None)
    seconds = round(time.monotonic() - started, 3)
    return Outcome({**describe_trial(trial), **result, "status": "ok", "seconds": seconds}, predictions)


def _run(trial: Trial) -> tuple[Row, dict[str, Any] | None]:
    from multihop.eval.trials.run_finetuned import run_labeled, run_spans
    from multihop.eval.trials.run_zero_shot import run_completion, run_translation, run_zero_shot

    match trial.kind:
        case "zero-shot":
            return run_zero_shot(trial)
        case "translation":
            return run_translation(trial)
        case "completion":
            return run_completion(trial)
        case "spans":
            return run_spans(trial)
    return run_labeled(trial)


def _check_finite(row: Row) -> None:
    """Raise NonFiniteLossError for metrics that JSON cannot represent."""
    from multihop.eval.finetune.loop import NonFiniteLossError

    metrics = {"value": row["value"], "dev_value": row["dev_value"], **row["other_metrics"]}
    for name, value in metrics.items():
        if value is not None and not math.isfinite(value):
            raise NonFiniteLossError(f"{name} is {value}")
