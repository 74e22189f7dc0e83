"""The verdict on each task, whether training helped: the trials with and without it, and their difference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from multihop.common.json_lines import Row
from multihop.eval.statistics.choose import Choice, choose
from multihop.eval.statistics.difference import (
    FEWEST_EXAMPLES,
    SIGNIFICANT,
    Difference,
    difference_of_examples,
    difference_of_seeds,
    holm,
    mean_by_seed,
)
from multihop.eval.statistics.formatting import amount, basis, show
from multihop.eval.statistics.read_predictions import RunRow, read_statistics
from multihop.eval.tasks.task import ON_PAIRS, UNTRAINED


@dataclass(frozen=True)
class TaskResult:
    """The trials of one task, by their initial weights."""

    task: str
    kind: str
    metric: str
    higher_is_better: bool
    pretrained: Choice | None
    parent: Choice | None
    """The trials from the initial weights of the training."""
    random: Choice | None
    by_step: dict[int, Choice]
    """The choices of this checkpoint and of earlier ones, by their step."""
    difference: Difference | None
    """Pretrained less random weights; None: a side is missing, or has too few seeds and no files of predictions."""
    parent_difference: Difference | None
    """Pretrained less the parent; None as for `difference`."""
    rows: tuple[Row, ...]
    """Rows of all planned trials of the task, with all settings."""

    @property
    def first(self) -> Row:
        """The first row, for fields that are equal in all rows of the task."""
        return self.rows[0]

    @property
    def best(self) -> Row | None:
        """The pretrained trial with the best development score; None if there is no development score."""
        sign = 1 if self.higher_is_better else -1
        tried = self.pretrained.chosen.rows if self.pretrained else ()
        chosen = [row for row in tried if row["dev_value"] is not None]
        return max(chosen, key=lambda row: sign * row["dev_value"], default=None)

    @property
    def unigram(self) -> float | None:
        """Zero-shot: the metric of a model that only knows token frequencies."""
        tried = self.pretrained.chosen.rows if self.pretrained else ()
        return next((row["other_metrics"].get("unigram perplexity") for row in tried), None)

    def values(self, init: str) -> list[float]:
        """Return the test scores at the chosen hyperparameters."""
        choice = {"pretrained": self.pretrained, "parent": self.parent, "random": self.random}[init]
        return choice.chosen.values if choice else []


def task_results(rows: Sequence[Row], run_dir: Path, earlier: Sequence[Row] = ()) -> list[TaskResult]:
    """Return one result for each task that has rows, in the rows' order.

    Args:
        rows, earlier: rows from `multihop.eval.trials.plan_file.read_results`.
        run_dir: directory of the run, with eval/predictions.

    Raises:
        UserError: a file of predictions is damaged.
    """
    return [
        _task_result(
            task,
            [row for row in rows if row["task"] == task],
            [row for row in earlier if row["task"] == task],
            run_dir,
        )
        for task in dict.fromkeys(row["task"] for row in rows)
    ]


def _task_result(task: str, rows: list[Row], earlier: list[Row], run_dir: Path) -> TaskResult:
    choices = {group.init: choice for group, choice in choose(rows).items()}
    pretrained, parent, random = (choices.get(init) for init in ("pretrained", "parent", "random"))
    ours = trials_of(run_dir, pretrained)
    by_step = {
        group.checkpoint_step: choice
        for group, choice in choose([*earlier, *rows]).items()
        if group.init == "pretrained" and group.checkpoint_step is not None
    }
    return TaskResult(
        task=task,
        kind=rows[0]["kind"],
        metric=rows[0]["metric"],
        higher_is_better=rows[0]["higher_is_better"],
        pretrained=pretrained,
        parent=parent,
        random=random,
        by_step=dict(sorted(by_step.items())),
        difference=difference(rows[0]["metric"], trials_of(run_dir, random), ours),
        parent_difference=difference(rows[0]["metric"], trials_of(run_dir, parent), ours),
        rows=tuple(rows),
    )


def trials_of(run_dir: Path, choice: Choice | None) -> list[RunRow]:
    """Return the trials that were chosen in a run; none if there is no choice."""
    return [(run_dir, row) for row in choice.chosen.rows] if choice else []


def difference(metric: str, first: Sequence[RunRow], second: Sequence[RunRow]) -> Difference | None:
    """Compare the second trials with the first ones; None if they cannot be compared.

    Examples and seeds are compared if each trial has a file of predictions, else the seeds alone. The seeds are those
    of fine-tuning, or those of pretraining where a side's trials start from several pretrained models.

    Raises:
        UserError: a file of predictions is damaged.
    """
    if not (first and second):
        return None
    seeds = _seeds_of(first), _seeds_of(second)
    tables = read_statistics(first, second)
    if tables is None:
        values = ([row["value"] for _, row in side] for side in (first, second))
        one, other = ((each @ mean_by_seed(of_side)).tolist() for each, of_side in zip(values, seeds, strict=True))
        return difference_of_seeds(one, other)
    key = " ".join(str(row["key"]) for _, row in (*first, *second))
    return difference_of_examples(metric, tables[0], tables[1], key, seeds)


def _seeds_of(trials: Sequence[RunRow]) -> list[int]:
    """Return the number of each trial's seed."""
    models = [row.get("checkpoint_sha256") for _, row in trials]
    numbers = {model: number for number, model in enumerate(dict.fromkeys(models))}
    return [numbers[model] for model in models] if len(numbers) > 1 else list(range(len(trials)))


@dataclass(frozen=True)
class Verdict:
    """Says whether training helped on a task: the pretraining, or the training of a translation model."""

    outcome: str
    """"helped", "did not help" or "inconclusive"."""
    sentence: str


def training_of(on_pairs: bool) -> str:
    """Return "pretraining", or "training" for a model trained on pairs, which is not fine-tuned afterwards."""
    return "training" if on_pairs else "pretraining"


def against_parent(results: Sequence[TaskResult]) -> list[TaskResult]:
    """Return the same results with the parent instead of random weights, to judge what this run's training added."""
    return [replace(result, random=result.parent, difference=result.parent_difference) for result in results]


def verdicts(results: Sequence[TaskResult], continued: bool = False) -> list[Verdict]:
    """Judge whether the trials differ by more than chance at 5 %, with Holm's correction for the number of tasks.

    Args:
        continued: whether the results are from `against_parent`.
    """
    tested = [r for r in results if not missing_for_verdict(r.kind, r.difference) and r.unigram is None]
    corrected = holm([result.difference.p for result in tested if result.difference])
    p_values = {result.task: p for result, p in zip(tested, corrected, strict=True)}
    more = "continued " if continued else ""
    return [
        _verdict(result, p_values.get(result.task), more + training_of(result.kind in ON_PAIRS)) for result in results
    ]


def missing_for_verdict(kind: str, difference: Difference | None) -> str:
    """Return the requirement that a verdict lacks; empty if none.

    A single fine-tuning seed does not show the variance over seeds; tasks without training have no seeds.
    """
    if kind in UNTRAINED and difference is None:
        return "files of predictions"
    if kind not in UNTRAINED and (difference is None or min(difference.seeds) < 2):
        return "at least two seeds on each side"
    assert difference is not None
    if difference.examples is not None and difference.examples < FEWEST_EXAMPLES:
        return f"at least {FEWEST_EXAMPLES} test examples instead of {difference.examples}"
    return ""


def _verdict(result: TaskResult, p: float | None, training: str) -> Verdict:
    ours, theirs, delta = result.values("pretrained"), result.values("random"), result.difference
    if not ours or not theirs:
        missing = " and ".join(name for name, values in (("with", ours), ("without", theirs)) if not values)
        return Verdict("inconclusive", f"There is no result {missing} {training} to compare.")
    values = f"{result.metric} {show(median(ours))} with {training}, {show(median(theirs))} without"
    if result.unigram is not None:
        return _beside_unigram(result, values)
    if p is None or delta is None:
        needed = missing_for_verdict(result.kind, delta)
        return Verdict("inconclusive", f"Values: {values}; {needed} are needed for a verdict.")
    if p > SIGNIFICANT:
        return Verdict(
            "inconclusive",
            f"Medians: {values}; the difference is not significant ({amount(delta, result.metric)}), {basis(delta)}.",
        )
    sign = 1 if delta.estimate > 0 else -1
    better = (sign > 0) == result.higher_is_better
    return Verdict(
        "helped" if better else "did not help",
        f"Medians: {values}; {'better' if better else 'worse'} with {training} by "
        f"{amount(delta, result.metric, sign)}, {basis(delta)}.",
    )


def _beside_unigram(result: TaskResult, values: str) -> Verdict:
    """Compare with a unigram model too, because beating random weights proves little."""
    unigram = result.unigram
    assert unigram is not None
    values += f", {show(unigram)} for a unigram model"
    ours = median(result.values("pretrained"))
    if ours >= unigram:
        return Verdict("did not help", f"Values: {values}; the model is no better than one that uses no context.")
    return Verdict("helped" if ours < median(result.values("random")) else "did not help", f"Values: {values}.")
