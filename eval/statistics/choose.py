"""The hyperparameters that each start of a task is judged at."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from multihop.common.files import canonical_json
from multihop.common.json_lines import Row


class Start(NamedTuple):
    """The weights that trials of a task start from."""

    task: str
    init: str
    """"pretrained", "parent" or "random"."""
    checkpoint_step: int | None


@dataclass(frozen=True)
class Setting:
    """The trials of one start with one set of hyperparameters: one line of the grid."""

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
    """The hyperparameters that a start is judged at, and all that were tried."""

    chosen: Setting
    grid: tuple[Setting, ...]


def _start_of(row: Row) -> Start:
    return Start(row["task"], row["init"], row.get("checkpoint_step"))


def choose(rows: Sequence[Row]) -> dict[Start, Choice]:
    """The hyperparameters of each start of each task that have the best median development score over the seeds.

    Test scores have no say, and random weights choose for themselves, so that no start is judged at settings that suit
    another. Settings with which fewer seeds succeeded lose, whatever their score: a median of the survivors would
    reward a rate that diverges. Of equal ones the first wins.

    Args:
        rows: one a trial, in the recipe's order (`multihop.eval.trials.evaluation_plan.read_results`).
    """
    starts: dict[Start, dict[bytes, list[Row]]] = {}
    for row in rows:
        settings = starts.setdefault(_start_of(row), {})
        settings.setdefault(canonical_json(row.get("hyperparameters") or {}), []).append(row)
    found = {}
    for start, settings in starts.items():
        grid = tuple(_setting(group) for group in settings.values())
        sign = 1 if next(iter(settings.values()))[0]["higher_is_better"] else -1
        found[start] = Choice(max(grid, key=lambda setting: _rank(setting, sign)), grid)
    return found


def _rank(setting: Setting, sign: int) -> tuple[int, float]:
    return len(setting.rows), float("-inf") if setting.dev is None else sign * setting.dev


def _setting(rows: list[Row]) -> Setting:
    ok = tuple(row for row in rows if row["status"] == "ok")
    return Setting(rows[0].get("hyperparameters") or {}, ok, len(rows) - len(ok))


def median_scores(rows: Sequence[Row]) -> Iterator[tuple[str, int, float]]:
    """(name, step of the checkpoint, median over the seeds at the chosen settings) of each task's test scores.

    The name is "TASK METRIC" for the run's checkpoints. Other starts have their own names, so that their scores do not
    appear in the history of the checkpoints: "TASK METRIC random", "TASK METRIC parent" and, for a Hugging Face
    model, "TASK METRIC eval.checkpoint". Their step is 0.
    """
    for start, choice in choose(rows).items():
        if choice.chosen.rows:
            name = f"{start.task} {choice.chosen.rows[0]['metric']}"
            own = start.init == "pretrained"
            if own and start.checkpoint_step is not None:
                yield name, start.checkpoint_step, statistics.median(choice.chosen.values)
            else:
                yield f"{name} {'eval.checkpoint' if own else start.init}", 0, statistics.median(choice.chosen.values)
