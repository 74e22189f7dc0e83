"""Which rows count, and which hyperparameters each start is judged at."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.files import canonical_json
from common.json_lines import Row
from eval.config import usual_seq_len


class Start(NamedTuple):
    """What trials of a task start from."""

    task: str
    init: str
    """"pretrained" or "random"."""
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


def task_names(section: dict[str, Any]) -> list[str]:
    """The names of the tasks of a recipe's `eval` section, whose items are names or mappings with a name."""
    return [_named(item)["name"] for item in section.get("tasks") or []]


def asked_rows(rows: Sequence[Row], section: dict[str, Any]) -> list[Row]:
    """The rows of trials that a recipe's `eval` section asks for, in the order of its tasks, grids and seeds.

    The last row of a trial counts. A hyperparameter that the section does not have may have any value. Of trials that
    start from another task's, those count whose source was run with the settings that are chosen for that task.
    """
    tasks = {item["name"]: item for item in map(_named, section.get("tasks") or [])}
    seeds = section.get("seeds") or []
    places: dict[bytes, tuple[list[int], Row]] = {}
    for row in rows:
        if row["task"] not in tasks or row["seed"] not in seeds:
            continue
        own = tasks[row["task"]]
        start_from = own.get("start_from")
        if row.get("start_from") != (start_from and _named(start_from)["name"]):
            continue
        settings = row.get("hyperparameters") or {}
        grid = {name: own[name] for name in settings if own.get(name) is not None}
        grid = {name: section[name] for name in settings if name in section} | grid
        if "seq_len" in grid and grid["seq_len"] is None:
            grid["seq_len"] = usual_seq_len(row["kind"])
        lists = {name: values if isinstance(values, list) else [values] for name, values in grid.items()}
        if all(settings[name] in lists[name] for name in lists):
            at = [values.index(settings[name]) for name, values in lists.items()]
            start = _start_of(row)
            trial = canonical_json([*start, settings, row["seed"], row.get("source_key")])
            places[trial] = [list(tasks).index(row["task"]), *at, seeds.index(row["seed"])], row
    return _from_chosen([row for _, row in sorted(places.values(), key=lambda found: found[0])])


def _from_chosen(rows: list[Row]) -> list[Row]:
    """Without trials that start from a trial whose settings are not chosen for its task."""
    first = [row for row in rows if "source_key" not in row]
    if len(first) == len(rows):
        return rows
    found = choose(first)
    settings = [(row, found[_start_of(row)].chosen.hyperparameters) for row in first]
    chosen = {row["key"] for row, best in settings if (row.get("hyperparameters") or {}) == best}
    return [row for row in rows if "source_key" not in row or row["source_key"] in chosen]


def _start_of(row: Row) -> Start:
    return Start(row["task"], row["init"], row.get("checkpoint_step"))


def choose(rows: Sequence[Row]) -> dict[Start, Choice]:
    """For each start of each task, the hyperparameters with the best median development score over the seeds.

    Test scores have no say, and random weights choose for themselves, so that no start is judged at settings that suit
    another. Settings with which fewer seeds succeeded lose, whatever their score: a median of the survivors would
    reward a rate that diverges. Of equal ones the first wins.

    Args:
        rows: one a trial, in the recipe's order (`asked_rows`).
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


def _named(item: Any) -> dict[str, Any]:
    """A task's mapping, with its name as rows have it: of one's own task, the name of its file."""
    own = item if isinstance(item, dict) else {"name": item}
    path = Path(own["name"])
    return {**own, "name": path.stem} if path.suffix in (".yaml", ".yml") else own
