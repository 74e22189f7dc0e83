"""The verdict at the top of a report of several runs: which run is better, by how much, and the limits of that."""

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from statistics import mean, median
from typing import get_args

from multihop.eval.report.compared_runs import ComparedRun, comparable
from multihop.eval.report.differences import METHOD, Outcome, RunDifference
from multihop.eval.report.render import TemplateContext
from multihop.eval.statistics.difference import SIGNIFICANT, difference_of_seeds, holm
from multihop.eval.statistics.formatting import amount, show
from multihop.eval.tasks.task import UNTRAINED

_EQUAL = (
    "No significant difference does not mean that two runs are equal: the intervals in the tables say how large their "
    "difference may be."
)
_ONE_SEED = (
    "Each run was trained with one seed. How much another seed would change is in no interval: repeat the runs with "
    "other seeds before relying on a small difference."
)


def verdict_context(runs: Sequence[ComparedRun], differences: Sequence[RunDifference]) -> TemplateContext:
    """Return the verdict, for the template.

    Args:
        runs: the others are compared with the first one.
        differences: from `run_differences`.
    """
    sentences = [*_on_tasks(runs, differences), *_on_losses(runs)]
    return {
        "verdict": sentences or ["There is nothing to compare yet: no two runs have a result of the same kind."],
        "verdicts": _by_run(runs, differences),
        "method": METHOD if any(each.outcome != "not judged" for each in differences) else "",
        "limits": _limits(runs, differences),
        "scores": _scores(runs, differences),
    }


def _on_tasks(runs: Sequence[ComparedRun], differences: Sequence[RunDifference]) -> list[str]:
    """Return a sentence on which run is better on the tasks; none if no difference is judged."""
    judged = [each for each in differences if each.outcome != "not judged"]
    if not judged:
        return []
    first, significant = runs[0].name, [each for each in judged if each.outcome in ("better", "worse")]
    tasks = _counted(len({each.row["task"] for each in judged}), "task")
    if not significant:
        others = _counted(len({each.names[1] for each in judged}), "other run")
        return [f"Tasks: no difference between {first} and {others} is significant, on {tasks}."]
    lead = {run.name: 0 for run in runs[1:]}
    for each in significant:
        lead[each.names[1]] += 1 if each.outcome == "better" else -1
    most = max(lead.values())
    if most <= 0:
        lost = [name for name, wins in lead.items() if wins < 0]
        rest = f"worse on more tasks than better: {_listed(lost)}" if lost else "each is better as often as worse"
        return [f"Tasks: no other run beats {first} on {tasks}; {rest}."]
    winners = [name for name, wins in lead.items() if wins == most]
    of_winner = [each for each in significant if each.names[1] == winners[0]]
    details = "; ".join(f"{each.outcome} on {_detail(each)}" for each in of_winner)
    verb = "wins" if len(winners) == 1 else "win"
    whose = "" if len(winners) == 1 else f" {winners[0]}:"
    return [f"Tasks: {_listed(winners)} {verb} against {first}, on {tasks}:{whose} {details}."]


def _on_losses(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a sentence on which of the runs that predict the same tokens as the first has the lowest held-out loss."""
    first = runs[0]
    group = [run for run in runs if run.final_losses and run.predicted_tokens == first.predicted_tokens]
    if first.predicted_tokens is None or not first.final_losses or len(runs) < 2:
        return []
    if len(group) < 2:
        return [f"Held-out loss: no other run predicts the same tokens as {first.name}."]
    best, second = sorted(group, key=lambda run: mean(run.final_losses))[:2]
    other = second if best is first else first
    less = mean(other.final_losses) - mean(best.final_losses)
    what = f"Held-out loss: {best.name} has the lowest, {show(mean(best.final_losses))} nats, {show(less)}"
    others = [run for run in group if run is not first]
    tests = [difference_of_seeds(first.final_losses, run.final_losses) for run in others]
    known = [test for test in tests if test]
    if len(known) < len(tests):
        return [f"{what} below {other.name}; with one training seed there is neither an interval nor a test."]
    number = others.index(other if best is first else best)
    margin, p = known[number].high - known[number].estimate, holm([test.p for test in known])[number]
    interval = f" [{show(less - margin)} to {show(less + margin)}]" if isfinite(margin) else ""
    verdict = "significant" if p <= SIGNIFICANT else "not significant"
    seeds = f"{len(best.final_losses)} + {len(other.final_losses)} training seeds"
    return [f"{what}{interval} below {other.name}: {verdict}, {_p(p)}, over {seeds}."]


def _by_run(runs: Sequence[ComparedRun], differences: Sequence[RunDifference]) -> list[tuple[str, str]]:
    """Return (name, text) for each run: on how many tasks it is better or worse than the first, or neither."""
    lines = []
    for run in runs[1:]:
        groups: dict[str, list[RunDifference]] = {}
        for each in differences:
            if each.names[1] == run.name:
                groups.setdefault(each.outcome, []).append(each)
        total = sum(map(len, groups.values()))
        parts = [
            f"{outcome} on {len(groups[outcome])} of {total} ({', '.join(map(_detail, groups[outcome]))})"
            for outcome in get_args(Outcome)
            if outcome in groups
        ]
        if parts:
            lines.append((run.name, ", ".join(parts)))
    return lines


def _detail(each: RunDifference) -> str:
    """Return the task with the size of its difference, or with the reason why it is not judged."""
    task = str(each.row["task"])
    if each.outcome == "not judged":
        return each.text
    if each.difference is None or each.outcome == "no significant difference":
        return task
    sign = 1 if each.difference.estimate > 0 else -1
    return f"{task} by {amount(each.difference, each.row['metric'], sign)}, {_p(each.p)}"


def _limits(runs: Sequence[ComparedRun], differences: Sequence[RunDifference]) -> list[str]:
    """Return what the verdict is based on and what it does not cover, one sentence each."""
    limits = []
    tasks = {each.row["task"] for each in differences if each.difference and each.row["kind"] not in UNTRAINED}
    seeds = [number for run in runs for task in tasks for number in _fine_tunings(run, task)]
    trained = [max(1, len(run.seeds)) for run in runs]
    if seeds:
        each = "Each score" if max(trained) == 1 else "The score of a training seed"
        limits.append(f"{each} is over {_range(seeds)} of fine-tuning.")
    limits.append(_ONE_SEED if max(trained) == 1 else f"A run was trained with {_range(trained)}.")
    if any(each.outcome == "no significant difference" for each in differences):
        limits.append(_EQUAL)
    every = [each for run in runs for each in run.seeds or (run,)]
    if sentence := comparable(every):
        limits.append(sentence)
    unfinished = [run.name for run in every if run.summary.get("status", "not started") != "done"]
    if unfinished:
        limits.append(f"Not finished yet: {', '.join(unfinished)}.")
    return limits


def _fine_tunings(run: ComparedRun, task: str) -> list[int]:
    """Return the number of fine-tuned models of each pretrained model; of random weights that of all."""
    return list(Counter(row.get("checkpoint_sha256") for _, row in run.trials(task, run.compared_init)).values())


def _scores(runs: Sequence[ComparedRun], differences: Sequence[RunDifference]) -> TemplateContext | None:
    """Return the table of medians (its columns after the runs' names, and its lines); None without a task."""
    tasks = list(dict.fromkeys(task for run in runs for task, init in run.choices if init == run.compared_init))
    if not tasks:
        return None
    marks = {
        (each.names[1], each.row["task"]): f" ({each.outcome})"
        for each in differences
        if each.outcome in ("better", "worse")
    }
    metrics = {
        task: choice.chosen.rows[0]["metric"]
        for run in reversed(runs)
        for (task, init), choice in run.choices.items()
        if init == run.compared_init
    }
    lines = []
    for run in runs:
        choices = [run.choices.get((task, run.compared_init)) for task in tasks]
        cells = [
            f"{show(median(choice.chosen.values))}{marks.get((run.name, task), '')}" if choice else ""
            for task, choice in zip(tasks, choices, strict=True)
        ]
        lines.append([run.name, *cells])
    return {"columns": [f"{task}, {metrics[task]}" for task in tasks], "lines": lines}


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return _counted(low, "seed") if low == high else f"{low} to {high} seeds"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
