"""The report of a run: report.html, report.md and pictures, made from the files of the run directory alone."""

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import read_json_object, write_atomically
from multihop.common.json_lines import Row, read_rows
from multihop.data_prep.dataset.manifest import MANIFEST
from multihop.eval.inference.examples import read_examples
from multihop.eval.report import FILES_OF_A_RUN
from multihop.eval.report.compared_runs import without_unread_keys
from multihop.eval.report.data_section import data_context
from multihop.eval.report.plan_section import plan_context
from multihop.eval.report.plots import (
    MAX_POINTS,
    Curve,
    Picture,
    draw_by_step,
    draw_lines,
    draw_losses,
    side_by_side,
)
from multihop.eval.report.render import TemplateContext, duration, render
from multihop.eval.report.results_section import results_context
from multihop.eval.report.run_metrics import (
    HEALTH,
    LOSS,
    PAIR_LOSSES,
    PARTS,
    REFERENCES,
    by_step,
    forecast,
    heldout,
    losses_by_source,
    training_clock,
)
from multihop.eval.statistics.formatting import show
from multihop.eval.trials.plan_file import read_results
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import TOKEN_LOSSES
from multihop.pretrain.run.audits import decisive_audits, first_different_step, outcome_of
from multihop.pretrain.run.changes import flatten

Pairs = list[tuple[str, str]]

_BY_STEP = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_s": "tokens/s"}
"""Fields of metrics.jsonl that are drawn below the loss, with the titles of their panels."""
_MEANINGS = {
    "unigram_gain": "how far the held-out loss on tokens is below the unigram model's, as a share of that; 0: only "
    "token frequencies are learned",
    "hidden_cosine": "mean cosine between the last hidden states of different tokens; 1: all tokens look alike",
    "hidden_rank": "effective rank of these states, as a share of what it can be; near 0: they differ in few "
    "directions only, 1: in all alike",
    "attention_entropy": "entropy of the attention weights, as a share of uniform attention's; 1: every token gets the "
    "same weight, 0: one token gets all",
}
_HEALTH_NOTE = (
    "hidden_cosine, hidden_rank and attention_entropy are measured on a sixteenth of the held-out samples. A rank "
    "below 0.2 is called a collapse if, "
    "three times in a row, the cosine is above 0.5 or the gain below 0.02. A small model that learns may have a low "
    "rank, too."
)
_TARGETS = {
    "mlm_loss": "masked tokens",
    "plm_loss": "tokens in a random order",
    "clm_loss": "the next token",
    "bilm_loss": "the next and the previous token",
    "translation_loss": "the target's next token",
    "completion_loss": "the target's next token",
    "ctc_loss": "the target's tokens",
}


def write_report(run_dir: Path, recipe: dict[str, Any] | None = None, summary: dict[str, Any] | None = None) -> None:
    """Write `report.html` (self-contained), `report.md` and its pictures into `run_dir`: `FILES_OF_A_RUN`.

    Reads recipe.json and summary.json and, if they exist, metrics.jsonl, plans.jsonl, eval/plan.json,
    eval/results.jsonl, eval/predictions/, eval/examples.json and data/.

    Args:
        recipe: resolved recipe, used instead of recipe.json.
        summary: summary, used instead of summary.json.

    Raises:
        UserError: recipe.json or summary.json is missing, or a file is damaged.
    """
    recipe = _read_json(run_dir / "recipe.json") if recipe is None else recipe
    summary = _read_json(run_dir / "summary.json") if summary is None else summary
    rows = read_rows(run_dir / "metrics.jsonl")
    results = read_results(run_dir)
    data = data_context(run_dir / "data", recipe) if (run_dir / "data" / MANIFEST).exists() else None
    sources = _source_names(losses_by_source(rows), recipe)
    pictures = [
        *_loss_picture(read_curves(rows, summary)),
        *_training_picture(rows),
        *_source_picture(losses_by_source(rows), sources),
    ]
    context = {
        "name": recipe.get("name", run_dir.name),
        "headline": headline(recipe, summary),
        "pictures": dict.fromkeys(FILES_OF_A_RUN) | {each.file: each.context() for each in pictures},
        "pretrains": (recipe.get("eval") or {}).get("checkpoint") is None,
        "losses": _loss_table(summary),
        "losses_note": "loss is the sum that is optimized; the other losses are its parts, in nats. Training: of the "
        "last logged batch.",
        "time": training_time(rows, recipe),
        **plan_context(run_dir, rows),
        "by_source": [
            (sources[source], f"{max(losses):,}", show(losses[max(losses)]))
            for source, losses in losses_by_source(rows).items()
        ],
        **health_context(rows, summary),
        "run": _run_rows(summary),
        "environment": as_pairs(summary.get("environment") or {}),
        "recipe": as_pairs(without_unread_keys(recipe)),
        "data": data,
        **examples_context(read_examples(run_dir / "eval", results.plan.examples) if results.plan else None),
        **results_context(results, recipe, run_dir),
    }
    for picture in pictures:
        write_atomically(run_dir / picture.file, picture.png())
    markdown, page = render("run.md.jinja", context["name"], context)
    write_atomically(run_dir / "report.md", markdown)
    write_atomically(run_dir / "report.html", page)


def _loss_picture(curves: list[Curve]) -> Iterator[Picture]:
    if curves:
        names = " and ".join(curve.name for curve in curves)
        alt = f"{names} by step on training and held-out text, with models that use no context as references"
        yield Picture("loss.png", alt, _caption(curves), partial(draw_losses, curves=curves))


def _training_picture(rows: list[Row]) -> Iterator[Picture]:
    series = {title: list(by_step(rows, name).items()) for name, title in _BY_STEP.items()}
    panels = {title: points for title, points in series.items() if points}
    if panels:
        yield Picture(
            "training.png",
            f"{', '.join(panels)} by step",
            "By step: the learning rate; the norm of the whole gradient before it is clipped; the tokens per second of "
            f"all ranks since the last row.{_thinned_note(max(map(len, panels.values())))}",
            partial(draw_by_step, panels=panels),
        )


def _source_picture(losses: dict[int, dict[int, float]], names: dict[int, str]) -> Iterator[Picture]:
    if losses:
        lines = [(names[source], by_source) for source, by_source in losses.items()]
        yield Picture(
            "loss-by-source.png",
            "Held-out loss by step, a line for each source of the data",
            "The held-out loss of each source, on the held-out samples that have text of it alone.",
            partial(draw_lines, panels=[("held-out loss (nats)", lines)], below="step"),
        )


def _source_names(losses: dict[int, dict[int, float]], recipe: dict[str, Any]) -> dict[int, str]:
    """Return a label for each source: its number in `data.sources` and the end of its path."""
    sources = (recipe.get("data") or {}).get("sources") or []
    paths = {number: str(source.get("path", "")) for number, source in enumerate(sources)}
    return {source: f"{source}: {'/'.join(paths.get(source, '').split('/')[-2:])}" for source in losses}


def training_time(rows: Sequence[Row], recipe: dict[str, Any]) -> str:
    """Return a sentence on how long training was forecast to take and how long it took; empty before a tenth of it."""
    total = sum(phase.get("steps") or 0 for phase in recipe.get("phases") or [])
    predicted = forecast(rows, total) if total else None
    if predicted is None:
        return ""
    step, seconds = predicted
    steps, _, elapsed = training_clock(rows)
    until = "it took" if steps[-1] >= total else f"until step {steps[-1]:,} it took"
    return (
        f"Forecast after the first {step:,} of {total:,} steps: {duration(seconds)} of training; {until} "
        f"{duration(elapsed[-1])}. Both are of the training loop at the logged rates, without start-up, held-out "
        "losses and pauses; the forecast is that all steps take as long as the first tenth."
    )


def read_curves(rows: list[Row], summary: dict[str, Any]) -> list[Curve]:
    """Return the parts of the loss by step, each with its references; parts that the run does not have are left out."""
    references = {"unigram model": summary.get("unigram_loss"), "uniform guess": summary.get("uniform_loss")}
    known = {name: value for name, value in references.items() if value is not None}
    coin = {"coin flip": math.log(2)}  # each kind is half of the pairs
    curves = [
        Curve(name, by_step(rows, name), by_step(rows, heldout(name)), known if name in TOKEN_LOSSES else coin)
        for name in (*TOKEN_LOSSES, *PAIR_LOSSES)
    ]
    return [curve for curve in curves if curve.train or curve.heldout]


def headline(recipe: dict[str, Any], summary: dict[str, Any]) -> str:
    """Return a sentence on the model and on its held-out loss next to those of two models that use no context."""
    published = (recipe.get("eval") or {}).get("checkpoint")
    if published is not None:
        return f"Evaluation of the Hugging Face model in {published}."
    model = recipe.get("model") or {}
    declared = FAMILIES.get(str(model.get("family")))
    trained = "trained" if declared and declared.translates else "pretrained"
    parent = model.get("init_from")
    began = "" if parent is None else f", initialized from {parent} (model.init_from)"
    sentence = (
        f"{declared.display_name if declared else 'A model'} with {model.get('layers')} layers and hidden size "
        f"{model.get('hidden')}, {trained} for {summary['steps']:,} steps on {summary['tokens']:,} tokens{began}. "
    )
    part = next((name for name in TOKEN_LOSSES if summary.get(heldout(name)) is not None), None)
    unigram, uniform = summary.get("unigram_loss"), summary.get("uniform_loss")
    if part is None or unigram is None or uniform is None:
        return sentence + "No held-out loss was measured."
    loss = summary[heldout(part)]
    sentence += f"Its held-out loss on {_TARGETS[part]} is {loss:.2f} nats; "
    sentence += (
        f"a unigram model, which knows only token frequencies, has {unigram:.2f}, a uniform guess {uniform:.2f}."
    )
    if loss < min(unigram, uniform):
        return sentence
    beaten = "beats the uniform guess but not the unigram model" if loss < uniform else "does not beat a uniform guess"
    return f"{sentence} The model {beaten}: it has not learned to use context."


def _caption(curves: list[Curve]) -> str:
    what = {
        "mlm_loss": "mlm_loss: cross-entropy of the masked tokens, in nats per token.",
        "plm_loss": "plm_loss: cross-entropy of the predicted tokens given those before them in the order, in nats per "
        "token.",
        "clm_loss": "clm_loss: cross-entropy of the next token, in nats per token.",
        "bilm_loss": "bilm_loss: mean cross-entropy of the next and of the previous token, in nats per token.",
        "translation_loss": "translation_loss: cross-entropy of the target's next token, in nats per token; held-out "
        "without label smoothing.",
        "completion_loss": "completion_loss: cross-entropy of the target's next token, in nats per token.",
        "ctc_loss": "ctc_loss: minus the log probability of the targets, over all alignments, in nats per token.",
        "nsp_loss": "nsp_loss: cross-entropy of next-sentence prediction, in nats per pair.",
        "sop_loss": "sop_loss: cross-entropy of sentence-order prediction, in nats per pair.",
    }
    references = "Horizontal lines: a unigram model, which knows only token frequencies, and a uniform guess, both on"
    sentences = " ".join([*(what[curve.name] for curve in curves), f"{references} the same held-out tokens."])
    return sentences + _thinned_note(max(len(curve.train) for curve in curves))


def _thinned_note(points: int) -> str:
    if points <= MAX_POINTS:
        return ""
    return " A point of a line is the mean of neighboring rows, between their smallest and largest values."


def _loss_table(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value on the last logged training batch, value on the held-out text) for each loss of the run."""
    pairs = [(LOSS, summary.get("train_loss"), summary.get(heldout(LOSS)))]
    pairs += [(name, summary.get(name), summary.get(heldout(name))) for name in PARTS]
    pairs += [(name, None, summary.get(name)) for name in REFERENCES]
    return [
        (name, "" if train is None else show(train), "" if held_out is None else show(held_out))
        for name, train, held_out in pairs
        if train is not None or held_out is not None
    ]


def _run_rows(summary: dict[str, Any]) -> Pairs:
    rows = [("status", str(summary["status"]))]
    rows += [("steps", f"{summary['steps']:,}"), ("tokens", f"{summary['tokens']:,}")]
    if summary.get("tokens_per_s") is not None:
        rows.append(("tokens/s", f"{summary['tokens_per_s']:,.0f}"))
    if summary.get("mfu") is not None:
        rows.append(("model TFLOP/s", f"{summary['tflops_per_s']:.3g} (MFU {summary['mfu']:.0%})"))
    if summary.get("launches", 0) > 1:
        rows.append(("launches", str(summary["launches"])))
    if audits := summary.get("audits"):
        newest = {(each["first"] + 1, each["last"]): _verdict(each) for each in decisive_audits(audits)}
        said = [f"steps {first:,} to {last:,} {verdict}" for (first, last), verdict in newest.items()]
        rows.append(("audits", "; ".join(said)))
    stages = summary.get("stages") or {}
    rows += [(f"{name} time", duration(seconds)) for name, seconds in stages.items()]
    return rows + ([("total time", duration(sum(stages.values())))] if stages else [])


def _verdict(audit: dict[str, Any]) -> str:
    conditions = f" ({'; '.join(audit.get('conditions', []))})"
    match outcome_of(audit):
        case "equal":
            step = first_different_step(audit)
            return "equal" if step is None else f"equal, but the state of step {step:,} differs"
        case "differs":
            return "differ"
        case "within rounding":
            return f"differ within rounding{conditions}"
        case "beyond rounding":
            return f"differ beyond rounding{conditions}"
        case "no verdict":
            return f"differ, no verdict: {audit['rounding']['reason']}{conditions}"
        case "not judged":
            return f"differ, as expected{conditions}"


def as_pairs(tree: Any) -> Pairs:
    """Return a nested JSON value as (key.path, text) pairs; list items are written as in overrides: `phases[0].lr`."""
    return [
        (path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for path, value in flatten(tree).items()
        if path
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, advice="delete it and rerun `multihop run`")
    except FileNotFoundError:
        raise UserError(f"{path} is missing: there is no report before training; use `multihop run`") from None


def health_context(rows: list[Row], summary: dict[str, Any]) -> TemplateContext:
    """Return the health of the model, for the template.

    Args:
        rows: rows of metrics.jsonl.
    """
    curves = {name: list(by_step(rows, name).items()) for name in HEALTH}
    panels = {name: points for name, points in curves.items() if points}
    return {
        "diagnosis": summary.get("diagnosis"),
        "health": [(name, f"{summary[name]:.3f}", _MEANINGS[name]) for name in HEALTH if summary.get(name) is not None],
        "health_note": _HEALTH_NOTE,
        "health_picture": side_by_side("health", f"{', '.join(panels)} by step of pretraining", panels)
        if panels
        else None,
    }


def examples_context(made: dict[str, Any] | None) -> dict[str, Any]:
    """Return the examples, for the template: the rows (text, before, after), and a sentence about them.

    Args:
        made: result of `multihop.eval.inference.examples.make_examples`; None if there is none.
    """
    if made is None:
        return {"examples": [], "examples_note": ""}
    is_filled = any(isinstance(each["after"], list) for each in made["examples"])
    answers = (
        "The likeliest tokens for each mask token, with their probabilities."
        if is_filled
        else "Continuations, sampled among the likeliest tokens with a fixed seed."
    )
    step = made["checkpoint_step"]
    return {
        "examples": [
            (each["text"], answer_text(each["before"]), answer_text(each["after"])) for each in made["examples"]
        ],
        "examples_note": answers if step is None else f"{answers} After: the checkpoint of step {step:,}.",
    }


def answer_text(answer: str | list[list[dict[str, Any]]]) -> str:
    """Return a continuation, or the tokens for each mask token: "sea 31%, river 12%; blue 8%, deep 7%"."""
    if isinstance(answer, str):
        return f"… {answer.strip()}"
    return "; ".join(", ".join(f"{each['token']} {each['probability']:.0%}" for each in mask) for mask in answer)
