"""The report of several runs: report.md, report.html and pictures, made from the files of their directories alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from multihop.common.config import LOGGING, effect_of
from multihop.common.errors import UserError
from multihop.common.files import make_folder, write_atomically
from multihop.eval.report.compared_runs import ComparedRun, over_seeds, read_runs
from multihop.eval.report.comparison_verdict import verdict_context
from multihop.eval.report.differences import RunDifference, run_differences
from multihop.eval.report.plots import Lines, Panel, Picture, Scores, draw_classes, draw_lines, draw_scores
from multihop.eval.report.render import TemplateContext, duration, render
from multihop.eval.report.run_metrics import at_steps, heldout, training_clock
from multihop.eval.report.task_section import metric_label
from multihop.eval.report.translations import ByLength, by_length, other_metrics, signatures
from multihop.eval.statistics.formatting import show, spread
from multihop.eval.tasks.task import ON_PAIRS
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.objectives.config import TOKEN_LOSSES
from multihop.pretrain.run.changes import differences

_MOST_CHARACTERS = 60
_INIT_NAMES = {"pretrained": "pretrained", "parent": "parent", "random": "random weights"}
_LOSS_NOTE = (
    "Held-out: the loss of the predicted tokens at the last step (mlm_loss, plm_loss, clm_loss, bilm_loss, "
    "translation_loss, completion_loss or ctc_loss), in nats per token, without losses on pairs. Unigram: the loss of "
    "a model that knows only token frequencies, on the same tokens. Training time: the training loop's, without "
    "start-up and held-out losses."
)
_SCORE_NOTE = (
    "Scores of the epoch with the best development score, at the settings with the best median development score, "
    "chosen for each run and initialization: median [minimum to maximum] over the seeds."
)


def write_comparison(
    run_dirs: Sequence[Path],
    out: Path,
    title: str,
    question: str = "",
    x: str | None = None,
    series: Sequence[str] = (),
) -> None:
    """Write `report.md`, `report.html` (self-contained) and PNG pictures into `out`.

    Args:
        run_dirs: directories of the runs; the others are compared with the first one.
        question: the question that the runs answer.
        x: a recipe key with a number, for a plot of the final held-out loss against it; of a key of `eval`, of the
            scores.
        series: recipe keys whose values distinguish the lines of that plot.

    Raises:
        UserError: a file is damaged, or no run has the key `x`.
    """
    named = read_runs(run_dirs)
    every, runs = _short_names(named), _with_inits(_short_names(over_seeds(named)))
    differences_of_runs = run_differences(runs)
    tasks = _tasks(runs)
    lengths = {task: by_length(runs, task) for task in tasks if _kind(runs, task) == "translation"}
    pictures = [
        *_score_picture(runs, tasks),
        *_loss_pictures(runs),
        *([_x_picture(every, tasks, x, series)] if x else []),
        *_length_picture(lengths),
    ]
    context = {
        "title": title,
        "question": question,
        **verdict_context(runs, differences_of_runs),
        "notes": [note for run in every for note in run.notes],
        "losses": [_loss_line(run) for run in every],
        "loss_note": _LOSS_NOTE,
        "pictures": [each.context() for each in pictures],
        "runs": _run_lines(runs),
        "tasks": [_task_section(runs, task, differences_of_runs, lengths.get(task)) for task in tasks],
        "score_note": _SCORE_NOTE,
        "failed": _failed(every),
        "environments": _environments(every),
    }
    make_folder(out)
    for each in pictures:
        write_atomically(out / each.file, each.png())
    markdown, page = render("comparison.md.jinja", title, context)
    write_atomically(out / "report.md", markdown)
    write_atomically(out / "report.html", page)


def _short_names(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs without the leading parts that all their names share, as in an experiment."""
    if len(runs) < 2:
        return list(runs)
    parts = [run.name.split("-") for run in runs]
    columns = zip(*(each[:-1] for each in parts), strict=False)
    same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return [replace(run, name="-".join(each[same:])) for run, each in zip(runs, parts, strict=True)]


def _with_inits(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the runs with their initial weights in their names, where not all are compared at the same ones."""
    if len({run.compared_init for run in runs}) == 1:
        return list(runs)
    return [
        run
        if run.compared_init == "pretrained"
        else replace(run, name=f"{run.name} ({_INIT_NAMES[run.compared_init]})")
        for run in runs
    ]


def _run_lines(runs: Sequence[ComparedRun]) -> list[tuple[str, str]]:
    """Return (name, text) for each run; the text says how its recipe differs from the first one's."""
    first = runs[0]
    lines = [(first.name, "the others are compared with it")]
    for run in runs[1:]:
        changed = [
            _change(first.recipe, run.recipe, key, then, now)
            for key, then, now in differences(first.recipe, run.recipe)
            # An empty list in one recipe and its entries in the other: the entries are listed too.
            if key != "name" and not _decides_nothing(key) and (then, now) not in (([], None), (None, []))
        ]
        lines.append((run.name, ", ".join(dict.fromkeys(changed)) or "nothing"))
    if any(run.seeds for run in runs):
        seeds = {run.name: ", ".join(str(each.recipe["seed"]) for each in run.seeds) for run in runs}
        lines = [(name, f"{text}; seeds {seeds[name]}" if seeds[name] else text) for name, text in lines]
    return lines


def _change(first: dict[str, Any], other: dict[str, Any], key: str, then: Any, now: Any) -> str:
    """Describe the difference at a key; if one recipe lacks the whole section, describe only that."""
    if section := _section_without(first, key):
        return f"{section} set (was none)"
    if section := _section_without(other, key):
        return f"{section} none (was set)"
    return f"{key} {_short(now)} (was {_short(then)})"


def _section_without(recipe: dict[str, Any], key: str) -> str | None:
    """Return the section of a key that is null in a recipe; None if no section is null."""
    parts, value = key.split("."), recipe
    for number, part in enumerate(parts[:-1], start=1):
        if not isinstance(value, dict) or part not in value:
            return None
        if value[part] is None:
            return ".".join(parts[:number])
        value = value[part]
    return None


def _decides_nothing(key: str) -> bool:
    """Return whether a key of pretraining only changes what is logged or kept, or only names what other keys set."""
    try:
        return effect_of(TrainingConfig, key) == LOGGING
    except KeyError:  # a key of another section or another version
        return False


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"


def _loss_line(run: ComparedRun) -> list[str]:
    steps, tokens, seconds = training_clock(run.metrics)
    losses, unigram = run.heldout_loss, run.summary.get("unigram_loss")
    return [
        run.name,
        str(run.summary.get("status", "not started")),
        f"{steps[-1]:,}",
        f"{tokens[-1]:,}",
        duration(seconds[-1]) if seconds[-1] else "",
        f"{tokens[-1] / seconds[-1]:,.0f}" if seconds[-1] else "",
        show(losses[max(losses)]) if losses else "",
        show(unigram) if unigram is not None else "",
    ]


def _loss_pictures(runs: Sequence[ComparedRun]) -> Iterator[Picture]:
    kinds = [name for name in TOKEN_LOSSES if any(run.loss_name == name for run in runs)]
    if not kinds:
        return
    highest = _highest_loss(runs)
    # The axes are indexes into the result of `training_clock`.
    for axis, what in ((1, "tokens"), (2, "seconds of training")):
        panels: list[Panel] = [
            (f"{heldout(name)} (nats)", [(run.name, _by(run, axis) if run.loss_name == name else {}) for run in runs])
            for name in kinds
        ]
        yield Picture(
            f"heldout-{what.partition(' ')[0]}.png",
            f"Held-out loss of each run against {what}",
            f"The held-out loss against {what}.{_cut_note(panels, highest)}",
            partial(draw_lines, panels=panels, below=what, highest=highest),
        )


def _highest_loss(runs: Sequence[ComparedRun]) -> float:
    """Return the upper limit of loss plots, a little above the loss of a uniform guess.

    Without a limit, a run that diverged would flatten all other curves.
    """
    return 1.1 * max((run.summary.get("uniform_loss") or inf for run in runs), default=inf)


def _cut_note(panels: Sequence[Panel], highest: float) -> str:
    most = max((y for _, lines in panels for _, points in lines for y in points.values()), default=0.0)
    return f" Losses above {highest:.1f}, more than those of a uniform guess, are cut off." if most > highest else ""


def _by(run: ComparedRun, axis: int) -> dict[float, float]:
    """Return the held-out loss by tokens (axis 1) or by seconds of training (axis 2)."""
    clock = training_clock(run.metrics)
    losses = run.heldout_loss
    return dict(zip(at_steps(list(losses), clock[0], clock[axis]), losses.values(), strict=True))


def _x_picture(runs: Sequence[ComparedRun], tasks: Sequence[str], x: str, series: Sequence[str]) -> Picture:
    """Return the plot of the final held-out losses against a key; of a key of `eval`, which changes no loss, the plot
    of the scores on each task.

    Raises:
        UserError: no run has a number there, and a loss or score.
    """
    of_scores = x.startswith("eval.")
    panels: list[Panel]
    if of_scores:
        scores = {task: [_values(run, task, run.compared_init) for run in runs] for task in tasks}
        panels = [
            (f"{task}: {_metric(runs, task)}", _lines(runs, x, series, of_task)) for task, of_task in scores.items()
        ]
    else:
        panels = [("final held-out loss (nats)", _lines(runs, x, series, [_final_loss(run) for run in runs]))]
    values = {at for _, lines in panels for _, points in lines for at in points}
    if not values:
        what = "score" if of_scores else "held-out loss"
        raise UserError(f"no run has a number as {x}, and a {what}; name a key of the recipes with a number")
    is_log = min(values) > 0 and max(values) >= 4 * min(values)
    if of_scores:
        return Picture(
            "scores-by-key.png",
            "Scores of each run against a key of the recipe",
            f"The median scores against {x}.",
            lambda colors: draw_lines(colors, panels, x, log_axis=is_log),
        )
    highest = _highest_loss(runs)
    return Picture(
        "loss-by-key.png",
        "Final held-out loss of each run against a key of the recipe",
        f"The final held-out loss against {x}; of several runs with the same values, the median."
        f"{_cut_note(panels, highest)}",
        lambda colors: draw_lines(colors, panels, x, log_axis=is_log, highest=highest),
    )


def _final_loss(run: ComparedRun) -> list[float]:
    losses = run.heldout_loss
    return [losses[max(losses)]] if losses else []


def _lines(runs: Sequence[ComparedRun], x: str, series: Sequence[str], values: Sequence[list[float]]) -> Lines:
    """Return a line for each combination of the values of `series`: the medians of the runs' values at each number
    that the runs have as x."""
    points: dict[str, dict[float, list[float]]] = {}
    for run, of_run in zip(runs, values, strict=True):
        keys = run.keys
        at = keys.get(x)
        if isinstance(at, int | float) and not isinstance(at, bool) and of_run:
            label = ", ".join(f"{key} {_short(keys.get(key))}" for key in series) or "all runs"
            points.setdefault(label, {}).setdefault(float(at), []).extend(of_run)
    return [(label, {at: median(of_at) for at, of_at in sorted(by_x.items())}) for label, by_x in points.items()]


def _tasks(runs: Sequence[ComparedRun]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task, _ in run.choices))


def _metric(runs: Sequence[ComparedRun], task: str) -> str:
    return metric_label(next(run.choices[key].chosen.rows[0] for run in runs for key in run.choices if key[0] == task))


def _values(run: ComparedRun, task: str, init: str) -> list[float]:
    choice = run.choices.get((task, init))
    return choice.chosen.values if choice else []


def _score_picture(runs: Sequence[ComparedRun], tasks: Sequence[str]) -> Iterator[Picture]:
    if not tasks:
        return
    scores = [
        Scores(
            f"{task}: {_metric(runs, task)}",
            [_values(run, task, run.compared_init) for run in runs],
            # A perplexity from random weights is hundreds of times the others: no axis shows both.
            [
                []
                if run.compared_init == "random" or _metric(runs, task).startswith("perplexity")
                else _values(run, task, "random")
                for run in runs
            ],
        )
        for task in tasks
    ]
    names = [run.name for run in runs]
    hollow = any(values for task in scores for values in task.random)
    yield Picture(
        "scores.png",
        "Scores of each run on each task",
        "Scores over the seeds: median, minimum and maximum."
        f"{' Hollow: from random weights, without their perplexities.' if hollow else ''}",
        lambda colors: draw_scores(colors, names, scores),
    )


def _length_picture(lengths: Mapping[str, ByLength | None]) -> Iterator[Picture]:
    panels = [(f"{task}: BLEU", each.labels, each.medians) for task, each in lengths.items() if each]
    if panels:
        yield Picture(
            "bleu-by-length.png",
            "BLEU of each run by the length of the source",
            "Corpus BLEU of the sentences whose source has so many words; the median over the seeds.",
            lambda colors: draw_classes(colors, panels),
        )


def _kind(runs: Sequence[ComparedRun], task: str) -> str:
    return next(str(each.chosen.rows[0]["kind"]) for run in runs for key, each in run.choices.items() if key[0] == task)


def _task_section(
    runs: Sequence[ComparedRun], task: str, pairs: Sequence[RunDifference], lengths: ByLength | None
) -> TemplateContext:
    differences_of = {each.names[1]: each.amount for each in pairs if each.row["task"] == task}
    on_pairs = _kind(runs, task) in ON_PAIRS
    names = _INIT_NAMES | ({"pretrained": "trained"} if on_pairs else {})
    shown = {run.compared_init for run in runs} | {
        init for init in names if any(_values(run, task, init) for run in runs)
    }
    inits = {init: name for init, name in names.items() if init in shown}
    return {
        "others": other_metrics(runs, task) if on_pairs else None,
        "signatures": signatures([row for run in runs for _, row in run.trials(task, run.compared_init)]),
        "lengths": lengths,
        "task": task,
        "inits": list(inits.values()),
        "metric": _metric(runs, task),
        "lines": [
            [
                run.name,
                *(spread(_values(run, task, init)) for init in inits),
                differences_of.get(run.name, ""),
            ]
            for run in runs
        ],
    }


def _failed(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a line for each run with failed trials at the chosen settings: its name and their number."""
    counts = [(run.name, sum(choice.chosen.failed for choice in run.choices.values())) for run in runs]
    return [f"{name}: {'1 trial' if count == 1 else f'{count} trials'}" for name, count in counts if count]


def _environments(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the dates of the runs, then a line for each distinct machine and set of versions."""
    lines = []
    for run in runs:
        if environment := run.summary.get("environment"):
            parts = [environment.get("device"), environment.get("cpu")]
            parts += [f"{environment['cores']} cores"] if "cores" in environment else []
            parts += [f"{name} {environment[name]}" for name in ("python", "torch", "deepspeed") if name in environment]
            parts += [f"commit {environment['commit']}"] if environment.get("commit") else []
            lines.append(", ".join(str(part) for part in dict.fromkeys(parts) if part))
    times = [row["time"] for run in runs for row in run.metrics if "time" in row]
    days = [datetime.fromtimestamp(at, UTC).date().isoformat() for at in (min(times), max(times))] if times else []
    return [" to ".join(dict.fromkeys(days)), *dict.fromkeys(lines)] if days else list(dict.fromkeys(lines))
