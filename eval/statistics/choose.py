"""Chooses the hyperparameters at which each initialization is judged on a task."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from multihop.common.files import canonical_json
from multihop.common.json_lines import Row


class TrialGroup(NamedTuple):
    """The trials of one task that start from the same weights, with all hyperparameters and seeds."""

    task: str
    init: str
    """"pretrained", "parent" or "random"."""
    checkpoint_step: int | None


@dataclass(frozen=True)
class Setting:
    """The trials of one group with one set of hyperparameters: one line of the grid."""

    hyperparameters: dict[str, Any]
    rows: tuple[Row, ...]
    """The successful trials, one a seed."""
    failed: int

    @property
    def dev(self) -> float | None:
        """Median development score over the seeds; None if there is none."""
        scores = [row["dev_value"] for row in self.rows if row["dev_value"] is not None]
        return statistics.median(scores) if scores else None

    @property
    def values(self) -> list[float]:
        """The metric of each successful trial."""
        return [row["value"] for row in self.rows]


@dataclass(frozen=True)
class Choice:
    """The hyperparameters at which a group is judged, and all that were tried."""

    chosen: Setting
    grid: tuple[Setting, ...]


def choose(rows: Sequence[Row]) -> dict[TrialGroup, Choice]:
    """Choose the hyperparameters of each group: those with the best median development score over the seeds.

    Test scores are not used, and each initialization gets its own choice, so that none is judged at settings that suit
    another. Settings with which fewer seeds succeeded lose, whatever their score: a median of the survivors would
    reward a rate that diverges. Of equal ones the first wins.

    Args:
        rows: one row for each trial, in the recipe's order (`multihop.eval.trials.plan_file.read_results`).
    """
    groups: dict[TrialGroup, dict[bytes, list[Row]]] = {}
    for row in rows:
        settings = groups.setdefault(TrialGroup(row["task"], row["init"], row.get("checkpoint_step")), {})
        settings.setdefault(canonical_json(row.get("hyperparameters") or {}), []).append(row)
    choices = {}
    for group, settings in groups.items():
        grid = tuple(_setting(trials) for trials in settings.values())
        choices[group] = _best(grid, next(iter(settings.values()))[0])
    return choices


def merged(choices: Sequence[Choice]) -> Choice:
    """Choose as `choose` does among the trials of several pretrained models together.

    Trials of several choices that are the same (from random weights, which are those of all models) count once.
    """
    settings: dict[bytes, list[Setting]] = {}
    for choice in choices:
        for setting in choice.grid:
            settings.setdefault(canonical_json(setting.hyperparameters), []).append(setting)
    grid = tuple(
        Setting(
            same[0].hyperparameters,
            tuple({row["key"]: row for setting in same for row in setting.rows}.values()),
            sum(setting.failed for setting in same),
        )
        for same in settings.values()
    )
    return _best(grid, choices[0].chosen.rows[0])


def _best(grid: tuple[Setting, ...], row: Row) -> Choice:
    """Choose among settings.

    Args:
        row: any trial, for the direction of the metric.
    """
    sign = 1 if row["higher_is_better"] else -1
    return Choice(max(grid, key=lambda setting: _rank(setting, sign)), grid)


def _rank(setting: Setting, sign: int) -> tuple[int, float]:
    return len(setting.rows), float("-inf") if setting.dev is None else sign * setting.dev


def _setting(rows: list[Row]) -> Setting:
    ok = tuple(row for row in rows if row["status"] == "ok")
    return Setting(rows[0].get("hyperparameters") or {}, ok, len(rows) - len(ok))


def median_scores(rows: Sequence[Row]) -> Iterator[tuple[str, int, float]]:
    """Yield (name, step of the checkpoint, median over the seeds at the chosen settings) of each group's test scores.

    The name is "TASK METRIC" for the run's checkpoints. Other weights have their own names, so that their scores do not
    appear in the history of the checkpoints: "TASK METRIC random", "TASK METRIC parent" and, for a Hugging Face
    model, "TASK METRIC eval.checkpoint". Their step is 0.
    """
    for group, choice in choose(rows).items():
        if choice.chosen.rows:
            name = f"{group.task} {choice.chosen.rows[0]['metric']}"
            pretrained = group.init == "pretrained"
            if pretrained and group.checkpoint_step is not None:
                yield name, group.checkpoint_step, statistics.median(choice.chosen.values)
            else:
                name = f"{name} {'eval.checkpoint' if pretrained else group.init}"
                yield name, 0, statistics.median(choice.chosen.values)
