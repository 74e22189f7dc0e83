"""The plan of a run's last evaluation, which selects the rows of eval/results.jsonl that are reported.

A run may be evaluated many times: other checkpoints, other models, task files that were edited and restored, more or
fewer seeds. All rows stay in results.jsonl, where only a row's key says what it is the result of. So an evaluation
writes the keys of its trials to eval/plan.json, before the first trial and again when more keys are known, and all code
that shows, compares or counts results reads them with `read_results`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from multihop.common.config import Record
from multihop.common.errors import UserError
from multihop.common.files import make_folder, read_json_object, write_atomically
from multihop.common.json_lines import Row, read_rows
from multihop.eval.config import EvalConfig
from multihop.eval.trials.start_from import last_rows, with_sources
from multihop.eval.trials.trial import Trial, trial_key

PLAN, RESULTS = "eval/plan.json", "eval/results.jsonl"
"""Paths within a run's directory."""
_MOST_BYTES = 256 * 2**20
"""Largest plan.json that is read: 70 bytes for each trial."""


class EvaluationPlan(Record):
    """The content of eval/plan.json."""

    format_version: Literal[1] = 1
    trials: list[str]
    """Keys in the order of the recipe's tasks, grids, seeds and initializations. A trial that starts from another
    task's weights is added once its source trial is chosen."""
    earlier: list[str]
    """Keys of the same trials with the run's earlier checkpoints that have a row, for scores by step."""
    examples: str | None
    """Key of the examples; None if the recipe has none."""
    section: dict[str, Any]
    """The recipe's `eval` section."""


@dataclass(frozen=True)
class Results:
    """The rows of results.jsonl that belong to the last evaluation."""

    rows: tuple[Row, ...]
    """Rows of the planned trials, in the plan's order; trials that have not run have none."""
    earlier: tuple[Row, ...]
    """Rows of the same trials with earlier checkpoints."""
    plan: EvaluationPlan | None
    """The plan; None if the run was not evaluated, or by a version that did not write plan.json."""
    lacks_plan: bool
    """Whether there are rows but no plan that selects them."""

    @property
    def unfinished(self) -> str:
        """A phrase with the number of planned trials without a row; empty if all have one."""
        planned = len(self.plan.trials) if self.plan else 0
        left = planned - len(self.rows)
        return f"{left:,} of {planned:,} trials have no result yet" if left else ""


def make_plan(trials: Sequence[Trial], rows: Sequence[Row], config: EvalConfig, examples: str | None) -> EvaluationPlan:
    """Return the plan of an evaluation, as far as its keys are known.

    Args:
        trials: trials from `multihop.eval.trials.list_trials.plan_trials`.
        rows: all rows of results.jsonl.
        config: the recipe's `eval` section.
        examples: key of the examples; None if there are none.
    """
    last = last_rows(rows)
    return EvaluationPlan(
        trials=[trial_key(trial) for trial in with_sources(trials, last)],
        earlier=[
            key
            for step, sha256 in _earlier_checkpoints(trials, rows)
            for trial in with_sources(
                [
                    replace(trial, checkpoint_step=step, checkpoint_sha256=sha256)
                    for trial in trials
                    if trial.init == "pretrained"
                ],
                last,
            )
            if (key := trial_key(trial)) in last
        ],
        examples=examples,
        section=config.model_dump(mode="json"),
    )


def write_plan(run_dir: Path, plan: EvaluationPlan) -> None:
    """Write plan.json if its content changes; the caller holds the lock of the run's evaluation."""
    if read_plan(run_dir) != plan:
        make_folder((run_dir / PLAN).parent)
        content = json.dumps(plan.model_dump(mode="json"), ensure_ascii=False, indent=1)
        write_atomically(run_dir / PLAN, content.encode() + b"\n")


def read_plan(run_dir: Path) -> EvaluationPlan | None:
    """Read plan.json; None if there is none.

    Raises:
        UserError: The file is damaged, or of another version.
    """
    advice = "remove it and rerun `multihop eval`: trials with a row are not repeated"
    try:
        return EvaluationPlan.model_validate(read_json_object(run_dir / PLAN, advice=advice, max_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{run_dir / PLAN} is not valid ({location}: {first['msg']}); {advice}") from None


def read_results(run_dir: Path) -> Results:
    """Read the rows of results.jsonl that the plan of the last evaluation selects.

    Raises:
        UserError: As for `read_plan`.
    """
    plan = read_plan(run_dir)
    last = last_rows(read_rows(run_dir / RESULTS))
    if plan is None:
        return Results((), (), None, bool(last))
    rows, earlier = (tuple(last[key] for key in keys if key in last) for keys in (plan.trials, plan.earlier))
    return Results(rows, earlier, plan, False)


def _earlier_checkpoints(trials: Sequence[Trial], rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Return (step, content hash) of the run's checkpoints before the evaluated one; empty for a Hugging Face model.

    Of several checkpoints of one step, the one that was evaluated last counts: the run was trained again from an
    earlier step.
    """
    now = next((trial.checkpoint_step for trial in trials if trial.init == "pretrained"), None)
    if now is None:
        return []
    steps = {
        row["checkpoint_step"]: row["checkpoint_sha256"]
        for row in rows
        if row["init"] == "pretrained" and row.get("checkpoint_sha256") and row.get("checkpoint_step") is not None
    }
    return sorted((step, sha256) for step, sha256 in steps.items() if step < now)
