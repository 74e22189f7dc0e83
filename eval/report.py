"""The report of a run: report.html and report.md, with its picture, from the files of the run directory alone."""

import base64
import json
from pathlib import Path
from typing import Any

from data_prep.files import write_atomically
from data_prep.manifest import MANIFEST, Manifest, read_manifest
from eval.curve import Curve, draw
from eval.results import Row, read_rows
from eval.verdict import TaskResult, Verdict, chance_of_no_overlap, newest_rows, show, task_results, verdict

_FAMILIES = {"bert": "BERT", "gpt2": "GPT-2"}
_LISTED_FILES = 50


def write_report(run_dir: Path) -> None:
    """Write `report.html` (self-contained), `report.md` and `loss.png` into `run_dir`.

    Reads recipe.json, summary.json and, where they are there, metrics.jsonl, eval/results.jsonl and data/manifest.json.

    Raises:
        ValueError: recipe.json or summary.json is missing, or a file is damaged.
    """
    facts = gather(run_dir)
    picture = draw(facts["curve"]) if facts["curve"].train or facts["curve"].heldout else None
    if picture:
        write_atomically(run_dir / "loss.png", picture)
    inlined = base64.b64encode(picture).decode() if picture else None
    write_atomically(run_dir / "report.md", _render("report.md.jinja", facts, picture=bool(picture)))
    write_atomically(run_dir / "report.html", _render("report.html.jinja", facts, picture=inlined))


def gather(run_dir: Path) -> dict[str, Any]:
    """All that the report says, as the templates read it."""
    recipe, summary = _read_json(run_dir / "recipe.json"), _read_json(run_dir / "summary.json")
    manifest = read_manifest(run_dir / "data") if (run_dir / "data" / MANIFEST).exists() else None
    section = recipe.get("eval") or {}
    tasks, seeds = section.get("tasks", []), section.get("seeds", [])
    rows = newest_rows(read_rows(run_dir / "eval" / "results.jsonl"), tasks, seeds)
    results = task_results(rows, tasks)
    verdicts = [(result, verdict(result)) for result in results]
    return {
        "name": recipe.get("name", run_dir.name),
        "headline": _headline(recipe, summary),
        "helped": _helped(verdicts, tasks),
        "verdicts": verdicts,
        "missing": [task for task in tasks if task not in {result.task for result in results}],
        "results": [_line(result) for result in results],
        "chance": _chance(results),
        "failed": [row for row in rows if row["status"] != "ok"],
        "curve": _curve(read_rows(run_dir / "metrics.jsonl"), summary),
        "masked": recipe.get("objective", {}).get("name", "").startswith("mlm"),
        "summary": summary,
        "totals": _totals(summary),
        "stages": [(name, duration(seconds)) for name, seconds in summary.get("stages", {}).items()],
        "environment": flatten(summary.get("environment") or {}),
        "recipe": flatten(recipe),
        "data": _data(manifest),
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}; a report needs a run that was trained: `multihop run`") from None
    except ValueError:
        raise ValueError(f"{path} is not valid JSON; train again to have it rewritten") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object; train again to have it rewritten")
    return content


def _headline(recipe: dict[str, Any], summary: dict[str, Any]) -> str:
    model = recipe.get("model", {})
    sentence = (
        f"A {_FAMILIES.get(model.get('family'), 'model')} of {model.get('layers')} layers, {model.get('hidden')} wide, "
        f"was pretrained for {summary['steps']:,} steps on {summary['tokens']:,} pieces of text. "
    )
    heldout, unigram, uniform = (summary.get(f"{key}_loss") for key in ("heldout", "unigram", "uniform"))
    if heldout is None or unigram is None or uniform is None:
        return sentence + "No held-out loss was measured."
    what = "the masked pieces" if model.get("family") == "bert" else "the next piece"
    sentence += f"On held-out text it predicts {what} with a loss of {heldout:.2f} nats"
    if heldout < unigram:
        return sentence + (
            f": better than knowing only how frequent each piece is ({unigram:.2f}) and than a uniform guess "
            f"({uniform:.2f})."
        )
    against = "but no better than" if heldout < uniform else "no better than a uniform guess nor than"
    return sentence + (
        f", {against} knowing only how frequent each piece is ({unigram:.2f}; a uniform guess: {uniform:.2f}). "
        "It has not yet learnt to use context."
    )


def _helped(verdicts: list[tuple[TaskResult, Verdict]], tasks: list[str]) -> str:
    """One sentence over all tasks."""
    if not tasks:
        return "No downstream task was tried, so that nothing is known of what the model is good for."
    if not verdicts:
        return "No trial of a downstream task has a result yet."
    outcomes = [found.outcome for _, found in verdicts]
    total = f"{len(outcomes)} task{'s' if len(outcomes) > 1 else ''}"
    parts = [
        f"{text} on {outcomes.count(outcome)}"
        for outcome, text in (("helped", "helped"), ("did not help", "did not help"), ("cannot be told", "cannot be told apart from no pretraining"))
        if outcome in outcomes
    ]
    return f"Of {total}, pretraining {', '.join(parts)}."


def _line(result: TaskResult) -> dict[str, str]:
    """A result as the table shows it."""
    best = result.best
    difference = result.difference
    return {
        "task": result.task,
        "kind": result.kind,
        "metric": result.metric + ("" if result.higher_is_better else " (lower is better)"),
        "pretrained": _spread(result.pretrained.values),
        "random": _spread(result.random.values),
        "difference": "–" if difference is None else ("+" if difference > 0 else "") + show(difference).replace("-", "−"),
        "trials": f"{_trials(result, 'ok')} / {_trials(result, 'failed')}",
        "best": "–" if best is None else f"{show(best['value'])} (seed {best['seed']}, dev {show(best['dev_value'])})",
        "source": result.source,
        "notes": result.notes,
    }


def _trials(result: TaskResult, status: str) -> str:
    spreads = (result.pretrained, result.random)
    return "+".join(str(len(spread.values) if status == "ok" else spread.failed) for spread in spreads)


def _spread(values: tuple[float, ...]) -> str:
    if not values:
        return "–"
    middle = show(TaskSpread(values))
    return middle if len(values) == 1 else f"{middle} [{show(min(values))}–{show(max(values))}]"
