"""Which rows of eval/results.jsonl count: those of the trials that the run's last evaluation asked for.

A run may be evaluated many times: other checkpoints, other models, files of a task that were edited and put back, more
or fewer seeds. All its rows stay in results.jsonl, where only a row's key says what it is the result of. So the
evaluation writes the keys that it asks for to eval/plan.json, before its first trial and again when more of them are
known, and whoever shows, compares or counts results gets the rows from `read_results`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from common.config import Record
from common.files import make_folder, read_json_object, write_atomically
from common.json_lines import Row, read_rows
from eval.config import EvalConfig
from eval.start_from import last_rows, with_sources
from eval.trial import Trial, trial_key

PLAN, RESULTS = "eval/plan.json", "eval/results.jsonl"
"""In a run's directory."""


class AskedTrials(Record):
    """The content of plan.json."""

    format_version: Literal[1] = 1
    trials: list[str]
    """Keys in the order of the recipe's tasks, grids, seeds and starts. A trial that starts from another task's weights
    is in it once its source is chosen."""
    earlier: list[str]
    """Keys of the same trials of the run's earlier checkpoints that were evaluated, for scores by step."""
    examples: str | None
    """Key of the examples; None: the recipe has none."""
    section: dict[str, Any]
    """The recipe's `eval` section."""


@dataclass(frozen=True)
class Results:
    """The results that count."""

    rows: tuple[Row, ...]
    """Of the trials that were asked for, in that order; those that have not run have none."""
    earlier: tuple[Row, ...]
    """Of earlier checkpoints."""
    asked: AskedTrials | None
    """None: the run was not evaluated, or by a version that did not write plan.json."""
    unknown: bool
    """Whether there are rows, and nothing says which were asked for."""

    @property
    def unfinished(self) -> str:
        """How many trials have no row yet, in words; empty: all have one."""
        asked = len(self.asked.trials) if self.asked else 0
        left = asked - len(self.rows)
        return f"{left:,} of {asked:,} trials have no result yet" if left else ""


def ask(trials: Sequence[Trial], rows: Sequence[Row], config: EvalConfig, examples: str | None) -> AskedTrials:
    """What an evaluation asks for, as far as it is known.

    Args:
        trials: of `eval.plan.plan_trials`.
        rows: of results.jsonl.
        examples: key of the examples; None: there are none.
    """
    last = last_rows(rows)
    return AskedTrials(
        trials=[trial_key(trial) for trial in with_sources(trials, last)],
        earlier=[
            trial_key(trial)
            for step, sha256 in _earlier_checkpoints(trials, rows)
            for trial in with_sources(
                [
                    replace(trial, checkpoint_step=step, checkpoint_sha256=sha256)
                    for trial in trials
                    if trial.init == "pretrained"
                ],
                last,
            )
        ],
        examples=examples,
        section=config.model_dump(mode="json"),
    )


def write_asked(run_dir: Path, asked: AskedTrials) -> None:
    """Write plan.json, if it says something else; the caller holds the lock of the run's evaluation."""
    if read_asked(run_dir) != asked:
        make_folder((run_dir / PLAN).parent)
        content = json.dumps(asked.model_dump(mode="json"), ensure_ascii=False, indent=1)
        write_atomically(run_dir / PLAN, content.encode() + b"\n")


def read_asked(run_dir: Path) -> AskedTrials | None:
    """What plan.json says; None if there is none.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    advice = "remove it, and run `multihop eval` again: trials that have their rows are not repeated"
    try:
        return AskedTrials.model_validate(read_json_object(run_dir / PLAN, advice=advice))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"{run_dir / PLAN} is not valid ({where}: {first['msg']}); {advice}") from None


def read_results(run_dir: Path) -> Results:
    """The rows of results.jsonl that count.

    Raises:
        ValueError: as `read_asked`.
    """
    asked = read_asked(run_dir)
    last = last_rows(read_rows(run_dir / RESULTS))
    if asked is None:
        return Results((), (), None, bool(last))
    rows, earlier = (tuple(last[key] for key in keys if key in last) for keys in (asked.trials, asked.earlier))
    return Results(rows, earlier, asked, False)


def _earlier_checkpoints(trials: Sequence[Trial], rows: Sequence[Row]) -> list[tuple[int, str]]:
    """(step, content hash) of the run's checkpoints before the one that is evaluated; none of a Hugging Face model.

    Of several with one step the last that was evaluated: the run was trained again from before it.
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
