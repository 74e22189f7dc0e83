"""The report's section on one task: settings, published scores, curves and errors."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multihop.common.json_lines import Row
from multihop.eval.config import SETTING_KINDS
from multihop.eval.report.plots import by_pretraining_step, learning_curves
from multihop.eval.report.published import published_beside
from multihop.eval.report.render import TemplateContext
from multihop.eval.statistics.choose import Choice, Setting
from multihop.eval.statistics.formatting import show, spread
from multihop.eval.statistics.read_predictions import read_predictions
from multihop.eval.statistics.verdict import TaskResult
from multihop.eval.tasks.task import ON_PAIRS

_LISTED_ERRORS = 10
_ERROR_CHARACTERS = 400
_CLASSES = 20


def task_section(result: TaskResult, model: dict[str, Any], run_dir: Path) -> TemplateContext:
    """Return the section on a task, for the templates.

    Args:
        model: the recipe's `model` section; published scores are looked up by its size.

    Raises:
        UserError: a file of predictions is damaged.
    """
    chosen = {name: choice for name, choice in _choices(result) if choice.chosen.rows}
    varied = _varied(result)
    content = read_predictions(run_dir, result.best) if result.best else None
    beside = published_beside(result.task, result.metric, model.get("layers"), model.get("hidden"))
    return {
        "task": result.task,
        "metric": result.metric,
        "reported_on": reported_on(result),
        "chosen": [(name, _settings_text(choice.chosen, result, varied)) for name, choice in chosen.items()],
        "grid": _grid(result, varied),
        "others": _other_metrics(chosen),
        "layer_weights": _layer_weights(chosen),
        "published": [(p.model, p.metric, show(p.score), p.split, p.source) for p in beside],
        "published_on_another": result.metric == "BLEU",
        "pictures": _pictures(result, {name: choice.chosen.rows for name, choice in chosen.items()}),
        "confusion": _confusion(result, content) if content else None,
        "errors": _errors(content) if content else [],
        "best": result.best,
        "seconds": sum(row.get("seconds") or 0.0 for row in result.rows),
        "trials": len(result.rows),
    }


def metric_label(row: Row) -> str:
    """Return the metric of a row, with the positive class of F1, and with "(lower is better)" if so."""
    labels = row.get("labels") or []
    of_class = f" of the class {labels[1]}" if row["metric"] == "F1" and len(labels) == 2 else ""
    return f"{row['metric']}{of_class}{'' if row['higher_is_better'] else ' (lower is better)'}"


def reported_on(result: TaskResult) -> str:
    """Return the name of the examples that were scored."""
    return str(result.first.get("reported_on", "test"))


def _settings_text(setting: Setting, result: TaskResult, varied: Sequence[str]) -> str:
    """Return the hyperparameters that differ within the task's grid; for a grid of one setting, all that matter."""
    names = varied or [name for name, value in setting.hyperparameters.items() if _matters(name, value, result)]
    return ", ".join(_setting(name, setting.hyperparameters.get(name)) for name in names)


def _setting(name: str, value: Any) -> str:
    """Return a name and its value; for a section, each key with its dotted name, as in a recipe's overrides."""
    if isinstance(value, dict):
        return ", ".join(_setting(f"{name}.{key}", inner) for key, inner in value.items())
    return f"{name} {_value(value)}"


def _choices(result: TaskResult) -> list[tuple[str, Choice]]:
    trained = "trained" if result.kind in ON_PAIRS else "pretrained"
    every = ((trained, result.pretrained), ("parent", result.parent), ("random weights", result.random))
    return [(name, choice) for name, choice in every if choice]


def _varied(result: TaskResult) -> list[str]:
    """Return the names of the hyperparameters that differ within the task's grid."""
    settings = [setting.hyperparameters for _, choice in _choices(result) for setting in choice.grid]
    names = dict.fromkeys(name for each in settings for name in each)
    return [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]


def _matters(name: str, value: Any, result: TaskResult) -> bool:
    if name == "report_on" and reported_on(result) == "test":
        return False
    return value is not None and result.kind in SETTING_KINDS.get(name, (result.kind,))


def _grid(result: TaskResult, varied: Sequence[str]) -> list[tuple[str, ...]]:
    """Return (initialization, settings, median development score, test scores, trials ok / failed, chosen) for each
    setting; nothing if there is only one."""
    if not varied:
        return []
    return [
        (
            name,
            _settings_text(setting, result, varied),
            show(setting.dev),
            spread(setting.values),
            f"{len(setting.rows)} / {setting.failed}",
            "chosen" if setting is choice.chosen else "",
        )
        for name, choice in _choices(result)
        for setting in choice.grid
    ]


def _other_metrics(chosen: dict[str, Choice]) -> list[tuple[str, ...]]:
    """Return a row for each metric: its name, then its spread over the seeds for each initialization."""
    trials = [[row["other_metrics"] for row in choice.chosen.rows] for choice in chosen.values()]
    names = dict.fromkeys(name for metrics in trials for each in metrics for name in each)
    return [(name, *(spread([each[name] for each in metrics if name in each]) for metrics in trials)) for name in names]


def _layer_weights(chosen: dict[str, Choice]) -> list[tuple[str, ...]]:
    """Return a row for each hidden state of a learned mix: its name, then the spread of its share over the seeds for
    each initialization; nothing without such a mix."""
    trials = [[row.get("layer_weights") or {} for row in choice.chosen.rows] for choice in chosen.values()]
    states = dict.fromkeys(
        (place, index) for group in trials for each in group for place, shares in each.items() for index in shares
    )
    several = len({place for place, _ in states}) > 1
    return [
        (
            ("embeddings" if index == "0" else f"layer {index}") + (f", {place} the BiLSTM" if several else ""),
            *(spread([each[place][index] for each in group if index in each.get(place, {})]) for group in trials),
        )
        for place, index in states
    ]


def _pictures(result: TaskResult, rows: dict[str, Sequence[Row]]) -> list[tuple[str, str]]:
    """Return (SVG, caption) for each picture."""
    pictures = []
    for part, title in (("loss", "training loss"), ("dev", "development score")):
        curves = {
            name: [p for row in group if (p := (row.get("curve") or {}).get(part))] for name, group in rows.items()
        }
        curves = {name: trials for name, trials in curves.items() if trials}
        if curves:
            alt = f"{title} by step of fine-tuning on {result.task}, a line for each seed"
            drawn = learning_curves(f"{result.task} {part}", title, alt, curves)
            pictures.append((drawn, f"The {title} while fine-tuning, a line for each seed."))
    steps = {step: choice.chosen.values for step, choice in result.by_step.items() if choice.chosen.rows}
    if len(steps) > 1:
        caption = f"The {result.metric} by the pretraining step of the checkpoint: median, minimum and maximum."
        alt = f"{result.metric} on {result.task} by the pretraining step of the checkpoint"
        pictures.append((by_pretraining_step(f"{result.task} steps", result.metric, alt, steps), caption))
    return pictures


def _confusion(result: TaskResult, content: dict[str, Any]) -> TemplateContext | None:
    """Return the class names and, for each true class, the counts of the predictions with their shares, 0 to 1."""
    labels = result.first.get("labels") or []
    if result.kind != "classification" or not 2 <= len(labels) <= _CLASSES:
        return None
    targets, predicted = (np.array(content[name], np.int64).ravel() for name in ("targets", "predicted"))
    counts = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(counts, (targets, predicted), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    lines = [
        (label, [(int(n), round(float(s), 3)) for n, s in zip(*line, strict=True)])
        for label, *line in zip(labels, counts, shares, strict=True)
    ]
    return {"labels": labels, "lines": lines}


def _errors(content: dict[str, Any]) -> list[TemplateContext]:
    """Return the wrong predictions with the highest probabilities."""
    wrong = sorted(content.get("errors") or [], key=lambda error: -(error.get("probability") or 0.0))
    return [
        {
            "text": _shortened(error["text"]),
            "target": _value(error["target"]),
            "predicted": _value(error["predicted"]),
            "probability": "" if error.get("probability") is None else f"{error['probability']:.2f}",
        }
        for error in wrong[:_LISTED_ERRORS]
    ]


def _shortened(text: Any) -> str:
    joined = " / ".join(text) if isinstance(text, list) else str(text)
    return joined if len(joined) <= _ERROR_CHARACTERS else f"{joined[:_ERROR_CHARACTERS]} …"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
