"""The report of a run: report.html and report.md, with its picture, from the files of the run directory alone."""

import base64
import json
import re
from pathlib import Path
from typing import Any

from data_prep.files import read_json_object, write_atomically
from data_prep.manifest import MANIFEST, Manifest, read_manifest
from data_prep.rows import Row, read_rows
from data_prep.shown import shown
from eval.curve import Curve, draw
from eval.verdict import Spread, TaskResult, Verdict, chance_of_no_overlap, newest_rows, show, task_results, verdict
from pretrain.changes import flatten

Facts = dict[str, Any]
Pairs = list[tuple[str, str]]

_LISTED_FILES = 50
# An underscore within a word is none of Markdown's, and a bracket that was never opened closes nothing.
_MARKDOWN = re.compile(r"[\\`*\[|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_MARKDOWN_AT_THE_START = re.compile(r"^(\d*)([-+=.)#])(?=[-=#\s]|$)")
_LOSSES = (
    "train_loss", "heldout_loss", "unigram_loss", "uniform_loss", "heldout_nsp_loss", "heldout_nsp_accuracy",
)  # fmt: skip
_FAMILIES = {"bert": "BERT", "albert": "ALBERT", "roberta": "RoBERTa", "gpt": "GPT", "gpt2": "GPT-2"}
_IN_WORDS = {
    "helped": "helped on {}",
    "did not help": "did not help on {}",
    "cannot be told": "cannot be told apart from random weights on {}",
}


def write_report(run_dir: Path) -> None:
    """Write `report.html` (self-contained), `report.md` and `loss.png` into `run_dir`.

    Reads recipe.json, summary.json and, where they are there, metrics.jsonl, eval/results.jsonl and
    data/manifest.json.

    Raises:
        ValueError: recipe.json or summary.json is missing, or a file is damaged.
    """
    recipe, summary = _read_json(run_dir / "recipe.json"), _read_json(run_dir / "summary.json")
    curve = read_curve(read_rows(run_dir / "metrics.jsonl"), summary)
    facts = {
        "name": recipe.get("name", run_dir.name),
        "headline": headline(recipe, summary),
        "caption": _caption(recipe),
        "run": _run_facts(summary),
        "environment": as_pairs(summary.get("environment") or {}),
        "recipe": as_pairs(recipe),
        "data": _data_facts(read_manifest(run_dir / "data")) if (run_dir / "data" / MANIFEST).exists() else None,
        **_task_facts(read_rows(run_dir / "eval" / "results.jsonl"), recipe.get("eval") or {}),
    }
    picture = draw(curve) if curve.train or curve.heldout else None
    facts["picture"] = base64.b64encode(picture).decode() if picture else None
    if picture:
        write_atomically(run_dir / "loss.png", picture)
    write_atomically(run_dir / "report.md", _render("report.md.jinja", facts))
    write_atomically(run_dir / "report.html", _render("report.html.jinja", facts))


def read_curve(rows: list[Row], summary: Facts) -> Curve:
    """The losses by step; of a step that was done again after a restart, the first row."""
    train: dict[int, float] = {}
    heldout: dict[int, float] = {}
    for row in rows:
        if "token_loss" in row:
            train.setdefault(row["step"], row["token_loss"])
        if "heldout_loss" in row:
            heldout.setdefault(row["step"], row["heldout_loss"])
    return Curve(train, heldout, summary.get("unigram_loss"), summary.get("uniform_loss"))


def headline(recipe: Facts, summary: Facts) -> str:
    """What was trained and what came out, in plain words."""
    model = recipe.get("model") or {}
    family = _FAMILIES.get(str(model.get("family")), "model")
    sentence = (
        f"A {family} of {model.get('layers')} layers, {model.get('hidden')} wide, was pretrained for "
        f"{summary['steps']:,} steps on {summary['tokens']:,} pieces of text. "
    )
    heldout, unigram, uniform = (summary.get(f"{name}_loss") for name in ("heldout", "unigram", "uniform"))
    if heldout is None or unigram is None or uniform is None:
        return sentence + "No held-out loss was measured."
    what = "the next piece" if model.get("family") in ("gpt", "gpt2") else "masked pieces"
    sentence += f"On held-out text it predicts {what} with a loss of {heldout:.2f} nats"
    if heldout < min(unigram, uniform):
        return (
            f"{sentence}; a model that only knows how frequent each piece is has {unigram:.2f}, a uniform guess "
            f"{uniform:.2f}."
        )
    beaten = "beats a uniform guess" if heldout < uniform else "does not even beat a uniform guess"
    return (
        f"{sentence}. It {beaten} ({uniform:.2f}) but is no better than a model that only knows how frequent each "
        f"piece is ({unigram:.2f}): it has not learnt to use the context."
    )


def _task_facts(rows: list[Row], section: Facts) -> Facts:
    tasks = section.get("tasks") or []
    rows = newest_rows(rows, tasks, section.get("seeds") or [])
    results = task_results(rows, tasks)
    verdicts = [(result, verdict(result)) for result in results]
    sizes = {(len(r.pretrained.values), len(r.random.values)) for r in results if r.kind != "zero-shot"}
    chance = [
        f"With {ours} and {theirs} seeds, two spreads stay apart by chance alone in "
        f"{chance_of_no_overlap(ours, theirs):.0%} of cases."
        for ours, theirs in sorted(sizes)
        if min(ours, theirs) > 1
    ]
    return {
        "helped": _helped([found for _, found in verdicts], tasks),
        "verdicts": verdicts,
        "chance": " ".join(chance),
        "missing": [task for task in tasks if task not in {result.task for result in results}],
        "results": [_line(result) for result in results],
        "table_note": "Median [lowest to highest] over the seeds, of the epoch with the best development score; "
        "difference of the medians; trials as with pretraining + without.",
        "failed": [row for row in rows if row["status"] != "ok"],
    }


def _helped(verdicts: list[Verdict], tasks: list[str]) -> str:
    """One sentence over all tasks."""
    if not tasks:
        return "No downstream task was asked for, so nothing is known of what the model is good for."
    if not verdicts:
        return "No trial of a downstream task has ended yet."
    outcomes = [found.outcome for found in verdicts]
    parts = [words.format(outcomes.count(outcome)) for outcome, words in _IN_WORDS.items() if outcome in outcomes]
    total = "the one task" if len(outcomes) == 1 else f"{len(outcomes)} tasks"
    return f"Of {total} tried, pretraining {', '.join(parts)}."


def _line(result: TaskResult) -> dict[str, str]:
    """A result as the table shows it."""
    best, difference, both = result.best, result.difference, (result.pretrained, result.random)
    ok, failed = "+".join(str(len(s.values)) for s in both), "+".join(str(s.failed) for s in both)
    return {
        "task": result.task,
        "kind": result.kind,
        "metric": result.metric + ("" if result.higher_is_better else " (lower is better)"),
        "pretrained": _spread(result.pretrained),
        "random": _spread(result.random),
        "difference": f"{'+' if (difference or 0) > 0 else ''}{show(difference)}",
        "trials": f"{ok} / {failed}",
        "best": f"{show(best['value'])} (seed {best['seed']}, dev {show(best['dev_value'])})" if best else "none",
        "source": result.source,
        "notes": result.notes,
    }


def _spread(spread: Spread) -> str:
    if not spread.values:
        return "none"
    if len(spread.values) == 1:
        return show(spread.median)
    return f"{show(spread.median)} [{show(min(spread.values))} to {show(max(spread.values))}]"


def _caption(recipe: Facts) -> str:
    name = str((recipe.get("objective") or {}).get("name", ""))
    what = "the masked pieces" if name.startswith("mlm") else "the next piece"
    return (
        f"Cross-entropy of {what}, in nats a piece. The two flat lines are references on the same held-out text: "
        "a model that only knows how frequent each piece is, and a guess that gives every piece the same chance."
    )


def _run_facts(summary: Facts) -> Pairs:
    facts = [("status", str(summary["status"]))]
    facts += [("steps", f"{summary['steps']:,}"), ("pieces", f"{summary['tokens']:,}")]
    if summary.get("tokens_per_s") is not None:
        facts.append(("pieces a second", f"{summary['tokens_per_s']:,.0f}"))
    if summary.get("mfu") is not None:
        speed = f"{summary['tflops_per_s']:.3g} TFLOP/s, {summary['mfu']:.0%} of the devices' matrix-product rate"
        facts.append(("model FLOPs", speed))
    for name in _LOSSES:
        if summary.get(name) is not None:
            facts.append((name.replace("_", " "), show(summary[name])))
    if summary.get("restarts"):
        facts.append(("restarts", str(summary["restarts"])))
    stages = summary.get("stages") or {}
    facts += [(f"time of {name}", duration(seconds)) for name, seconds in stages.items()]
    return facts + ([("time of all stages", duration(sum(stages.values())))] if stages else [])


def _data_facts(manifest: Manifest) -> Facts:
    facts = [("fingerprint", manifest.fingerprint)]
    for split, total in manifest.totals.items():
        what = f"{total.documents:,} documents, {total.sentences:,} sentences, {total.tokens:,} pieces"
        facts.append((f"{split} text", f"{what}, {total.text_bytes / 1e6:,.1f} MB"))
    tokenizer = manifest.tokenizer
    facts.append(("tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size:,} pieces, SHA-256 {tokenizer.sha256}"))
    for stage, counts in manifest.counts.items():
        facts += [(f"{stage}: {reason.replace('_', ' ')}", f"{number:,}") for reason, number in counts.items()]
    return {
        "facts": facts,
        "set_aside": manifest.set_aside[:_LISTED_FILES],
        "more_set_aside": len(manifest.set_aside[_LISTED_FILES:]),
    }


def as_pairs(tree: Any) -> Pairs:
    """A nested JSON value as (key.path, text) pairs, list items as in overrides: `phases[0].lr`."""
    return [
        (path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for path, value in flatten(tree).items()
        if path
    ]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _read_json(path: Path) -> Facts:
    try:
        return read_json_object(path, advice="delete it and use `multihop run` again")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; a report needs a run that was trained: use `multihop run`") from None


def _render(template: str, facts: Facts) -> bytes:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    html = template.endswith(".html.jinja")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=html,
        finalize=None if html else _as_markdown,
        undefined=StrictUndefined,
        trim_blocks=html,
    )
    return environment.get_template(template).render(facts).encode()


def _as_markdown(value: Any) -> str:
    """One line that Markdown shows as it is written: no HTML, heading, list, link, picture, or cell of a table.

    Names of files, errors and what a recipe holds may have been chosen by somebody else than the reader.
    """
    text = " ".join(shown(str(value)).split())
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return _MARKDOWN_AT_THE_START.sub(r"\1\\\2", _MARKDOWN.sub(r"\\\g<0>", text))
