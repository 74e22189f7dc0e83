"""Write the plan of an evaluation that was not run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multihop.eval.trials.plan_file import PLAN, EvaluationPlan


def write_plan_for(
    run: Path, rows: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]] = (), examples: str | None = None
) -> None:
    """Write plan.json of a run with a recipe.json, as if the last evaluation had planned the trials of these rows."""
    keys, before = ([*dict.fromkeys(row["key"] for row in part)] for part in (rows, earlier))
    section = json.loads((run / "recipe.json").read_text()).get("eval") or {}
    plan = EvaluationPlan(trials=keys, earlier=before, examples=examples, section=section)
    (run / PLAN).parent.mkdir(exist_ok=True)
    (run / PLAN).write_text(json.dumps(plan.model_dump(mode="json")))
