"""The report's section on all tasks: a summary sentence, the verdicts and the table of results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multihop.eval.report.render import TemplateContext
from multihop.eval.report.task_section import metric_label, reported_on, task_section
from multihop.eval.statistics.formatting import amount, show, spread
from multihop.eval.statistics.verdict import TaskResult, Verdict, against_parent, task_results, training_of, verdicts
from multihop.eval.tasks.known_tasks import task_name
from multihop.eval.tasks.task import ON_PAIRS, UNTRAINED
from multihop.eval.trials.plan_file import Results
from multihop.pretrain.models.families import FAMILIES

_IN_WORDS = {"helped": "helped on {}", "did not help": "did not help on {}", "inconclusive": "was inconclusive on {}"}
_FINE_TUNED = (
    "All initializations are fine-tuned with the same grid of settings; each is judged at the settings with its best "
    "median development score. Differences are of the means over the seeds, with 95 % intervals by a paired bootstrap "
    "of the test examples and the spread over the seeds (Student's t). "
)
_AS_THEY_ARE = "Differences have 95 % intervals by a paired bootstrap of the test examples. "
_HOLM = (
    "A verdict needs p ≤ 0.05 after Holm's correction for the number of tasks. All trials share one {trained} model: "
    "another seed of the {training} is not covered."
)
_ONE_INIT = (
    "With eval.inits: [{inits}] alone there is nothing to compare with: the report does not say whether {training} "
    "helped."
)
_CONTINUED = (
    "What the parent model (model.init_from) had learned counts as {training} here; add parent to eval.inits to see "
    "what this run added."
)
_TABLE_NOTE = (
    "Scores of the epoch with the best development score, at the chosen settings: median [minimum to maximum] over the "
    "seeds. Difference: of the means, with its 95 % interval. Trials: {trained} + random weights, at the chosen "
    "settings."
)


def results_context(reported: Results, recipe: dict[str, Any], run_dir: Path) -> TemplateContext:
    """Return the section on the trials, for the template.

    Args:
        recipe: the resolved recipe.

    Raises:
        UserError: a file of predictions is damaged.
    """
    section = recipe.get("eval") or {}
    model = {} if section.get("checkpoint") else recipe.get("model") or {}
    tasks = [task_name(item if isinstance(item, str) else item["name"]) for item in section.get("tasks") or []]
    results = task_results(reported.rows, run_dir, reported.earlier)
    inits = section.get("inits", ["pretrained", "random"])
    with_random, with_parent = ({"pretrained", init} <= {*inits} for init in ("random", "parent"))
    random_verdicts = verdicts(results) if with_random else []
    parent_verdicts = verdicts(against_parent(results), continued=True) if with_parent else []
    family = FAMILIES.get(str(model.get("family")))
    on_pairs = family is not None and (
        family.translates or (bool(results) and all(result.kind in ON_PAIRS for result in results))
    )
    training, trained = training_of(on_pairs), "trained" if on_pairs else "pretrained"
    step = next((row["checkpoint_step"] for row in reported.rows if row["init"] == "pretrained"), None)
    of_step = "" if step is None else f" {trained.capitalize()}: the checkpoint of step {step:,}."
    method = _AS_THEY_ARE if all(result.kind in UNTRAINED for result in results) else _FINE_TUNED
    sentences = [helped(random_verdicts, tasks, training)] if with_random or not tasks else []
    if tasks and with_parent:
        sentences.append(helped(parent_verdicts, tasks, f"continued {training}"))
    elif tasks and with_random and model.get("init_from"):
        sentences.append(_CONTINUED.format(training=training))
    return {
        "training": training,
        "trained": trained,
        "helped": " ".join(sentences) or _ONE_INIT.format(inits=", ".join(inits), training=training),
        "questions": [
            (f"Did {what} help?", list(zip(results, answers, strict=True)))
            for what, answers in ((training, random_verdicts), (f"continued {training}", parent_verdicts))
            if answers
        ],
        "with_parent": with_parent,
        "method": method + _HOLM.format(trained=trained, training=training),
        "missing": [task for task in tasks if task not in {result.task for result in results}],
        "unfinished": reported.unfinished,
        "results": [_line(result) for result in results],
        "table_note": _TABLE_NOTE.format(trained=f"{trained} + parent" if with_parent else trained) + of_step,
        "sections": [task_section(result, model, run_dir) for result in results],
        "failed": [row for row in reported.rows if row["status"] != "ok"],
    }


def helped(of_tasks: Sequence[Verdict], tasks: Sequence[str], training: str) -> str:
    """Return a sentence on how many tasks the training helped on.

    Args:
        of_tasks: the verdicts of the tasks that have results.
        tasks: the recipe's tasks.
        training: the word for the training, from `training_of`.
    """
    if not tasks:
        return f"The recipe has no downstream tasks, so it is unknown whether {training} helps on any."
    if not of_tasks:
        return "No downstream trial has finished yet."
    outcomes = [verdict.outcome for verdict in of_tasks]
    parts = [words.format(outcomes.count(outcome)) for outcome, words in _IN_WORDS.items() if outcome in outcomes]
    total = "1 task" if len(outcomes) == 1 else f"{len(outcomes)} tasks"
    return f"Of {total}, {training} {' and '.join(parts)}."


def _notes_on_weights(result: TaskResult) -> list[str]:
    """Return notes on weights beside the initial ones: those of another task, and those of a second model."""
    notes = []
    if source := result.first.get("start_from"):
        notes.append(f"trials start from the weights that were fine-tuned on {source}")
    if "average_with_sha256" in result.first:
        notes.append(
            "class probabilities are averaged with those of a second model, which was fine-tuned in the same way"
        )
    return notes


def _line(result: TaskResult) -> dict[str, str]:
    """Return the cells of a result's row in the table."""
    best = result.best
    choices = [result.pretrained, *([result.parent] if result.parent else []), result.random]
    examples = reported_on(result)
    metric = metric_label(result.first)
    return {
        "task": result.task,
        "kind": result.kind,
        "metric": metric if examples == "test" else f"{metric}, on {examples}",
        "pretrained": spread(result.values("pretrained")),
        "parent": spread(result.values("parent")),
        "parent_difference": amount(result.parent_difference, result.metric) if result.parent_difference else "none",
        "random": spread(result.values("random")),
        "difference": amount(result.difference, result.metric) if result.difference else "none",
        "trials": "+".join(str(len(choice.chosen.rows) if choice else 0) for choice in choices)
        + " / "
        + "+".join(str(choice.chosen.failed if choice else 0) for choice in choices),
        "best": f"{show(best['value'])} (seed {best['seed']}, dev {show(best['dev_value'])})" if best else "none",
        "source": str(result.first["source"]),
        "notes": "; ".join(note for note in (str(result.first["notes"]), *_notes_on_weights(result)) if note),
    }
