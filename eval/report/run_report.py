"""The report of a run: report.html, report.md and loss.png, made from the files of the run directory alone."""

import base64
import json
import math
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.files import read_json_object, write_atomically
from multihop.common.json_lines import Row, read_rows
from multihop.data_prep.dataset.manifest import MANIFEST, Manifest, read_data_manifest
from multihop.eval.inference.examples import read_examples
from multihop.eval.report.figures import as_png
from multihop.eval.report.pictures import Curve, draw_losses, side_by_side
from multihop.eval.report.render import TemplateContext, duration, render
from multihop.eval.report.results import results_facts
from multihop.eval.report.run_metrics import (
    HEALTH,
    LANGUAGE_MODEL_LOSSES,
    LOSS,
    PAIR_LOSSES,
    PARTS,
    REFERENCES,
    by_step,
    heldout,
)
from multihop.eval.statistics.words import show
from multihop.eval.trials.evaluation_plan import read_results
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.run.changes import flatten

Pairs = list[tuple[str, str]]

_LISTED_FILES = 50
_LOSS_ALT = "Losses by step on training and held-out text, with a unigram model and a uniform guess as references"
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
    "The last three are measured on a sixteenth of the held-out samples. A rank below 0.2 is called a collapse if, "
    "three times in a row, the cosine is above 0.5 or the gain below 0.02. A small model that learns may have a low "
    "rank, too."
)
_TARGETS = {"mlm_loss": "masked tokens", "clm_loss": "the next token", "translation_loss": "the target's next token"}


def write_report(run_dir: Path, recipe: dict[str, Any] | None = None, summary: dict[str, Any] | None = None) -> None:
    """Write `report.html` (self-contained), `report.md` and `loss.png` into `run_dir`.

    Reads recipe.json and summary.json and, if they exist, metrics.jsonl, eval/plan.json, eval/results.jsonl,
    eval/predictions/, eval/examples.json and data/manifest.json.

    Args:
        recipe: instead of recipe.json.
        summary: instead of summary.json.

    Raises:
        UserError: recipe.json or summary.json is missing, or a file is damaged.
    """
    recipe = _read_json(run_dir / "recipe.json") if recipe is None else recipe
    summary = _read_json(run_dir / "summary.json") if summary is None else summary
    rows = read_rows(run_dir / "metrics.jsonl")
    curves, results = read_curves(rows, summary), read_results(run_dir)
    facts = {
        "name": recipe.get("name", run_dir.name),
        "headline": headline(recipe, summary),
        "caption": _caption(curves),
        "picture": None,
        "picture_alt": _LOSS_ALT,
        "pretrains": (recipe.get("eval") or {}).get("checkpoint") is None,
        "losses": _loss_table(summary),
        "losses_note": "loss is the sum that is optimised; the other losses are its parts, in nats. Training: of the "
        "last logged batch.",
        **health_facts(rows, summary),
        "run": _run_facts(summary),
        "environment": as_pairs(summary.get("environment") or {}),
        "recipe": as_pairs(recipe),
        "data": _data_facts(read_data_manifest(run_dir / "data")) if (run_dir / "data" / MANIFEST).exists() else None,
        **examples_facts(read_examples(run_dir / "eval", results.plan.examples) if results.plan else None),
        **results_facts(results, recipe, run_dir),
    }
    picture = as_png(draw_losses(curves)) if curves else None
    if picture:
        write_atomically(run_dir / "loss.png", picture)
        encoded = base64.b64encode(picture).decode()
        facts["picture"] = f'<img src="data:image/png;base64,{encoded}" alt="{_LOSS_ALT}">'
    markdown, page = render("run.md.jinja", facts["name"], facts)
    write_atomically(run_dir / "report.md", markdown)
    write_atomically(run_dir / "report.html", page)


def read_curves(rows: list[Row], summary: dict[str, Any]) -> list[Curve]:
    """The parts of the loss by step, each with its references; parts that the run does not have are left out."""
    references = {"unigram model": summary.get("unigram_loss"), "uniform guess": summary.get("uniform_loss")}
    known = {name: value for name, value in references.items() if value is not None}
    coin = {"coin flip": math.log(2)}  # half of the pairs are of each kind
    found = [
        Curve(name, by_step(rows, name), by_step(rows, heldout(name)), known if name in LANGUAGE_MODEL_LOSSES else coin)
        for name in (*LANGUAGE_MODEL_LOSSES, *PAIR_LOSSES)
    ]
    return [curve for curve in found if curve.train or curve.heldout]


def headline(recipe: dict[str, Any], summary: dict[str, Any]) -> str:
    """A sentence on the model, and on its held-out loss beside those of two models that use no context."""
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
    part = next((name for name in LANGUAGE_MODEL_LOSSES if summary.get(heldout(name)) is not None), None)
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
        "clm_loss": "clm_loss: cross-entropy of the next token, in nats per token.",
        "translation_loss": "translation_loss: cross-entropy of the target's next token, in nats per token; held-out "
        "without label smoothing.",
        "nsp_loss": "nsp_loss: cross-entropy of next-sentence prediction, in nats per pair.",
        "sop_loss": "sop_loss: cross-entropy of sentence-order prediction, in nats per pair.",
    }
    references = "Horizontal lines: a unigram model, which knows only token frequencies, and a uniform guess, both on"
    return " ".join([*(what[curve.name] for curve in curves), f"{references} the same held-out tokens."])


def _loss_table(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value on the last logged batch of training, value on the held-out text, of each loss that the run has."""
    pairs = [(LOSS, summary.get("train_loss"), summary.get(heldout(LOSS)))]
    pairs += [(name, summary.get(name), summary.get(heldout(name))) for name in PARTS]
    pairs += [(name, None, summary.get(name)) for name in REFERENCES]
    return [
        (name, "" if train is None else show(train), "" if held_out is None else show(held_out))
        for name, train, held_out in pairs
        if train is not None or held_out is not None
    ]


def _run_facts(summary: dict[str, Any]) -> Pairs:
    facts = [("status", str(summary["status"]))]
    facts += [("steps", f"{summary['steps']:,}"), ("tokens", f"{summary['tokens']:,}")]
    if summary.get("tokens_per_s") is not None:
        facts.append(("tokens/s", f"{summary['tokens_per_s']:,.0f}"))
    if summary.get("mfu") is not None:
        facts.append(("model TFLOP/s", f"{summary['tflops_per_s']:.3g} (MFU {summary['mfu']:.0%})"))
    if summary.get("restarts"):
        facts.append(("restarts", str(summary["restarts"])))
    stages = summary.get("stages") or {}
    facts += [(f"{name} time", duration(seconds)) for name, seconds in stages.items()]
    return facts + ([("total time", duration(sum(stages.values())))] if stages else [])


def _data_facts(manifest: Manifest) -> TemplateContext:
    facts = [("fingerprint", manifest.fingerprint)]
    for split, total in manifest.totals.items():
        what = f"{total.documents:,} documents, {total.sentences:,} sentences, {total.tokens:,} tokens"
        facts.append((f"{split} text", f"{what}, {total.text_bytes / 1e6:,.1f} MB"))
    for name, info in (("tokenizer", manifest.tokenizer), ("tokenizer of the target", manifest.target_tokenizer)):
        if info is not None:
            facts.append((name, f"{info.kind}, {info.vocab_size:,} tokens, SHA-256 {info.sha256}"))
    for stage, counts in manifest.counts.items():
        facts += [(f"{stage}: {reason.replace('_', ' ')}", f"{number:,}") for reason, number in counts.items()]
    return {
        "facts": facts,
        "set_aside": manifest.set_aside[:_LISTED_FILES],
        "more_set_aside": len(manifest.set_aside[_LISTED_FILES:]),
    }


def as_pairs(tree: Any) -> Pairs:
    """A nested JSON value as (key.path, text) pairs; list items are written as in overrides: `phases[0].lr`."""
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


def health_facts(rows: list[Row], summary: dict[str, Any]) -> TemplateContext:
    """The health of the model, for the template.

    Args:
        rows: of metrics.jsonl.
    """
    curves = {name: list(by_step(rows, name).items()) for name in HEALTH}
    panels = {name: points for name, points in curves.items() if points}
    return {
        "diagnosis": summary.get("diagnosis"),
        "health": [(name, f"{summary[name]:.3f}", _MEANINGS[name]) for name in HEALTH if summary.get(name) is not None],
        "health_note": _HEALTH_NOTE,
        "health_picture": side_by_side("health", "The numbers of the table by step", panels) if panels else None,
    }


def examples_facts(made: dict[str, Any] | None) -> dict[str, Any]:
    """The examples, for the template: the rows (text, before, after), and a sentence about them.

    Args:
        made: what `multihop.eval.inference.examples.make_examples` returned; None: nothing.
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
    """A continuation, or the tokens for each mask token: "sea 31 %, river 12 %; blue 8 %, deep 7 %"."""
    if isinstance(answer, str):
        return f"… {answer.strip()}"
    return "; ".join(", ".join(f"{each['token']} {each['probability']:.0%}" for each in mask) for mask in answer)
