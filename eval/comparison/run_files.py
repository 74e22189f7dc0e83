"""What the files of a run say, to set it beside others."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from common.files import read_json_object
from common.json_lines import Row, read_rows
from eval.losses import LANGUAGE_MODEL_LOSSES, by_step, heldout
from eval.statistics.choose import Choice, Setting, asked_rows, choose
from eval.statistics.predictions import Trial
from eval.tasks.task import UNTRAINED
from eval.verdict import trials_of
from pretrain.run.changes import flatten

Facts = dict[str, Any]
Choices = dict[tuple[str, str], Choice]
"""By task and initial weights."""


@dataclass(frozen=True)
class ComparedRun:
    """A run as its files are now; what it does not have yet is empty."""

    name: str
    folder: Path
    recipe: Facts
    """Resolved."""
    summary: Facts
    metrics: tuple[Row, ...]
    choices: Choices
    """Of the newest checkpoint that has trials."""
    seeds: tuple["ComparedRun", ...] = ()
    """The runs that this one stands for: see `over_seeds`."""

    @property
    def keys(self) -> Facts:
        """The recipe's values by dotted key."""
        return flatten(self.recipe)

    def trials(self, task: str, init: str) -> list[Trial]:
        """The chosen ones; none if it has no results of this task and start."""
        if self.seeds:
            found = {row["key"]: (run_dir, row) for run in self.seeds for run_dir, row in run.trials(task, init)}
            return list(found.values())
        return trials_of(self.folder, self.choices.get((task, init)))

    @property
    def loss_name(self) -> str:
        """`mlm_loss` or `clm_loss`; empty before a held-out loss was measured."""
        names = (name for name in LANGUAGE_MODEL_LOSSES if by_step(self.metrics, heldout(name)))
        return next(names, "")

    @property
    def heldout_loss(self) -> dict[int, float]:
        """The language-model loss on the held-out text by step, in nats: the sum also depends on other objectives."""
        return by_step(self.metrics, heldout(self.loss_name))


def read_run(folder: Path) -> ComparedRun:
    """Read recipe.json and, if they exist, summary.json, metrics.jsonl and eval/results.jsonl.

    Raises:
        ValueError: a file is damaged, or recipe.json is not a resolved recipe.
    """
    recipe = _read_recipe(folder / "recipe.json")
    try:
        summary = read_json_object(folder / "summary.json", advice="rerun the same command: it is rewritten")
    except FileNotFoundError:
        summary = {}
    found = choose(asked_rows(read_rows(folder / "eval" / "results.jsonl"), recipe["eval"]))
    ordered = sorted(found.items(), key=lambda item: item[0].checkpoint_step or 0)
    choices = {(start.task, start.init): choice for start, choice in ordered if choice.chosen.rows}
    metrics = tuple(read_rows(folder / "metrics.jsonl"))
    return ComparedRun(folder.resolve().name, folder, recipe, summary, metrics, choices)


def over_seeds(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Runs whose names are alike but for `-seedN`, where N is the seed of their recipe, as one without it in its name;
    what it has beside its trials is the first one's. The others as they are.

    Runs that were fine-tuned stay apart: their trials have seeds of their own.
    """
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        trained = any(choice.chosen.rows[0]["kind"] not in UNTRAINED for choice in run.choices.values())
        groups.setdefault(run.name if trained else _without_seed(run), []).append(run)
    return [_as_one(name, group) if len(group) > 1 else group[0] for name, group in groups.items()]


def _without_seed(run: ComparedRun) -> str:
    return re.sub(rf"(^|-)seed{run.recipe.get('seed')}(-|$)", lambda found: "-" * all(found.groups()), run.name)


def _as_one(name: str, runs: Sequence[ComparedRun]) -> ComparedRun:
    keys = dict.fromkeys(key for run in runs for key in run.choices)
    one = replace(runs[0], name=name, seeds=tuple(runs))
    return replace(one, choices={key: _choice_of([row for _, row in one.trials(*key)]) for key in keys})


def _choice_of(rows: Sequence[Row]) -> Choice:
    setting = Setting(rows[0].get("hyperparameters") or {}, tuple(rows), 0)
    return Choice(setting, (setting,))


def training_clock(metrics: Sequence[Row]) -> tuple[list[int], list[int], list[float]]:
    """Steps, tokens and seconds of training until each logged step, from 0 on.

    The seconds are those of the training loop at the rates that were logged: without start-up, held-out losses, and
    pauses between starts. They are comparable between runs on one machine that nothing else used.
    """
    steps, tokens, seconds = [0], [0], [0.0]
    logged = {row["step"]: row for row in reversed(metrics) if "tokens_per_s" in row}  # the first row of a step counts
    for step, row in sorted(logged.items()):
        seconds.append(seconds[-1] + (row["tokens"] - tokens[-1]) / row["tokens_per_s"])
        steps.append(step)
        tokens.append(row["tokens"])
    return steps, tokens, seconds


def at_steps(wanted: Sequence[int], steps: Sequence[int], values: Sequence[float]) -> list[float]:
    """Values at steps between logged ones, by linear interpolation."""
    return [float(value) for value in np.interp(wanted, steps, values)]


def _read_recipe(path: Path) -> Facts:
    recipe = read_json_object(path)
    asked = recipe.get("eval")
    if not isinstance(asked, dict) or not all(isinstance(asked.get(key), list) for key in ("tasks", "seeds")):
        raise ValueError(
            f"{path} is not a resolved recipe: eval.tasks or eval.seeds is missing; restore it from a backup"
        )
    return recipe
