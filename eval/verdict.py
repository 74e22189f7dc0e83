"""What the rows of results.jsonl say together: medians, spreads, and whether pretraining helped."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from data_prep.rows import Row


@dataclass(frozen=True)
class Spread:
    """The results of one task from one kind of initial weights."""

    values: tuple[float, ...]
    failed: int

    @property
    def median(self) -> float:
        """Raises StatisticsError where there are no values."""
        return median(self.values)


@dataclass(frozen=True)
class TaskResult:
    """One line of the results table."""

    task: str
    kind: str
    metric: str
    higher_is_better: bool
    pretrained: Spread
    random: Spread
    best: Row | None
    """The pretrained trial with the best development score; None where nothing was chosen by one."""
    unigram: float | None
    """Zero-shot: the metric of a model that only knows how frequent each piece is."""
    source: str
    notes: str

    @property
    def difference(self) -> float | None:
        """Median with pretraining minus median without; None where one is missing."""
        if not self.pretrained.values or not self.random.values:
            return None
        return self.pretrained.median - self.random.median


def newest_rows(rows: Sequence[Row], tasks: Sequence[str], seeds: Sequence[int]) -> list[Row]:
    """Of each (task, initial weights, seed) that the recipe asks for, the last row."""
    newest = {(row["task"], row["init"], row["seed"]): row for row in rows}
    return [row for (task, _, seed), row in newest.items() if task in tasks and seed in seeds]


def task_results(rows: Sequence[Row], tasks: Sequence[str]) -> list[TaskResult]:
    """One result a task that has rows, in the order of `tasks`."""
    return [_task_result([row for row in rows if row["task"] == task]) for task in tasks if _has(rows, task)]


def _has(rows: Sequence[Row], task: str) -> bool:
    return any(row["task"] == task for row in rows)


def _task_result(rows: Sequence[Row]) -> TaskResult:
    def spread(init: str) -> Spread:
        mine = [row for row in rows if row["init"] == init]
        ok = [row for row in mine if row["status"] == "ok"]
        return Spread(tuple(row["value"] for row in ok), len(mine) - len(ok))

    first = rows[0]
    sign = 1 if first["higher_is_better"] else -1
    tried = [row for row in rows if row["init"] == "pretrained" and row["status"] == "ok"]
    chosen = [row for row in tried if row["dev_value"] is not None]
    return TaskResult(
        task=first["task"],
        kind=first["kind"],
        metric=first["metric"],
        higher_is_better=first["higher_is_better"],
        pretrained=spread("pretrained"),
        random=spread("random"),
        best=max(chosen, key=lambda row: sign * row["dev_value"], default=None),
        unigram=next((row["other_metrics"].get("unigram perplexity") for row in tried), None),
        source=first["source"],
        notes=first["notes"],
    )


@dataclass(frozen=True)
class Verdict:
    """Whether pretraining helped on a task."""

    outcome: str
    """"helped", "did not help" or "cannot be told"."""
    sentence: str


def verdict(result: TaskResult) -> Verdict:
    """The plain truth: pretraining helped, or did harm, only where every seed with it beats every seed without."""
    ours, theirs, metric = result.pretrained, result.random, result.metric
    if not ours.values or not theirs.values:
        missing = " and ".join(name for name, spread in (("with", ours), ("without", theirs)) if not spread.values)
        return Verdict("cannot be told", f"No trial {missing} pretraining ended with a result.")
    numbers = f"{metric} {show(ours.median)} with pretraining, {show(theirs.median)} without"
    if result.kind == "zero-shot":
        return _zero_shot_verdict(result, numbers)
    sign = 1 if result.higher_is_better else -1
    with_it, without = [sign * value for value in ours.values], [sign * value for value in theirs.values]
    if min(len(with_it), len(without)) == 1:
        return Verdict(
            "cannot be told", f"Values: {numbers}; one seed on a side has no spread to judge the difference by."
        )
    if min(with_it) > max(without):
        return Verdict("helped", f"Medians: {numbers}; the worst seed with it beats the best without.")
    if max(with_it) < min(without):
        return Verdict("did not help", f"Medians: {numbers}; the best seed with it loses to the worst without.")
    if result.difference == 0:
        return Verdict("cannot be told", f"The medians are equal: {numbers}.")
    direction = "better" if median(with_it) > median(without) else "worse"
    return Verdict(
        "cannot be told",
        f"Medians: {numbers}; {direction} with pretraining, but the spreads over the seeds overlap.",
    )


def _zero_shot_verdict(result: TaskResult, numbers: str) -> Verdict:
    """Random weights are no opponent: a unigram model is."""
    unigram = result.unigram
    assert unigram is not None
    numbers += f", {show(unigram)} of a unigram model"
    if result.pretrained.median < min(unigram, result.random.median):
        return Verdict("helped", f"Values: {numbers}.")
    return Verdict("did not help", f"Values: {numbers}; the model predicts no better than one that knows no context.")


def chance_of_no_overlap(ours: int, theirs: int) -> float:
    """How often two sets of so many results from the same distribution do not overlap, in either direction."""
    return min(1.0, 2 / comb(ours + theirs, ours))


def show(value: float | None) -> str:
    """A metric or a loss as it stands in tables; None: there is none."""
    if value is None:
        return "none"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"
