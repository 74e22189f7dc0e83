"""The differences between several runs and the first on the tasks that both have, in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from multihop.common.json_lines import Row
from multihop.eval.report.compared_runs import ComparedRun
from multihop.eval.statistics.difference import SIGNIFICANT, Difference, holm
from multihop.eval.statistics.formatting import amount, sentence
from multihop.eval.statistics.verdict import difference, missing_for_verdict
from multihop.eval.tasks.running_text import PSEUDO

METHOD = (
    "Differences of the mean over the seeds, with 95 % intervals by a paired bootstrap of the test examples and the "
    "spread over the seeds; a run is called better where p is at most 0.05 after Holm's correction for all comparisons."
)
Outcome = Literal["better", "worse", "no significant difference", "not judged"]


@dataclass(frozen=True)
class RunDifference:
    """The difference between another run and the first one on a task, each at its `compared_init`."""

    names: tuple[str, str]
    row: Row
    """A trial of the first run, for the values that all trials of the task share."""
    difference: Difference | None
    """The other less the first; None if the scores are not of the same thing."""
    p: float
    """The p-value of the difference after Holm's correction; 1 where it is not judged."""
    outcome: Outcome
    """The outcome for the other run."""
    text: str

    @property
    def amount(self) -> str:
        """The difference with its interval."""
        return amount(self.difference, self.row["metric"]) if self.difference else "none"


def run_differences(runs: Sequence[ComparedRun]) -> list[RunDifference]:
    """Compare each run with the first one, task by task.

    Raises:
        UserError: a file of predictions is damaged.
    """
    pairs = [_pair(runs[0], other, task) for other in runs[1:] for task in shared_tasks(runs[0], other)]
    p_values = iter(holm([pair.difference.p for pair in pairs if pair.difference and not pair.why_not]))
    return [_in_words(pair, 1.0 if pair.why_not else next(p_values)) for pair in pairs]


def shared_tasks(first: ComparedRun, other: ComparedRun) -> list[str]:
    """Return the tasks on which both runs have results at their `compared_init`."""
    return [
        task
        for task, init in first.choices
        if init == first.compared_init and (task, other.compared_init) in other.choices
    ]


@dataclass(frozen=True)
class _Pair:
    names: tuple[str, str]
    row: Row
    difference: Difference | None
    why_not: str
    """The reason why no verdict can be given; empty if one can."""


def _pair(first: ComparedRun, other: ComparedRun, task: str) -> _Pair:
    names, keys = (first.name, other.name), ((task, first.compared_init), (task, other.compared_init))
    row, others = first.choices[keys[0]].chosen.rows[0], other.choices[keys[1]].chosen.rows[0]
    if why_not := _incomparable(row, others):
        return _Pair(names, row, None, why_not)
    between = difference(row["metric"], first.trials(*keys[0]), other.trials(*keys[1]))
    missing = missing_for_verdict(row["kind"], between)
    return _Pair(names, row, between, f"{missing} are needed" if missing else "")


def _incomparable(one: Row, other: Row) -> str:
    """Return the reason why two scores of a task are not comparable; empty if they are."""
    if one["metric"] != other["metric"]:
        return f"the metrics are {one['metric']} and {other['metric']}"
    if one["metric"] == "perplexity" and _units(one) != _units(other):
        return "the runs' tokenizers cut the text into different tokens"
    if one["metric"] == "perplexity" and _is_pseudo(one) != _is_pseudo(other):
        return "one is the pseudo-perplexity of a masked model"
    same = one["test_fingerprint"] == other["test_fingerprint"]
    return "" if same else "the runs have different test sets"


def _is_pseudo(row: Row) -> bool:
    return any(name.startswith(PSEUDO) for name in row["other_metrics"])


def _units(row: Row) -> float | None:
    """Return the number of units that a perplexity is the mean over: words, whatever the tokenizer, or tokens."""
    counts = row["other_metrics"]
    return next((counts[unit] for unit in ("words", "words and line ends", "tokens") if unit in counts), None)


def _in_words(pair: _Pair, p: float) -> RunDifference:
    names, row, between = pair.names, pair.row, pair.difference
    if between is None or pair.why_not:
        numbers = f" (difference {amount(between, row['metric'])})" if between else ""
        text = f"{row['task']} is not judged{numbers}: {pair.why_not}"
        return RunDifference(names, row, between, 1.0, "not judged", text)
    text = sentence(names, row["task"], row["metric"], row["higher_is_better"], between, p)
    if p > SIGNIFICANT:
        return RunDifference(names, row, between, p, "no significant difference", text)
    better = (between.estimate > 0) == row["higher_is_better"]
    return RunDifference(names, row, between, p, "better" if better else "worse", text)
