"""The report agrees with the files of the run, also where the results are bad."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import numpy as np
import pytest
from evaluation_plans import write_plan_for
from markdown_it import MarkdownIt
from reported_runs import LOSSES, RECIPE, SUMMARY, Tables, predict, read_report, report_row, report_rows, reported_run

from multihop.common.errors import UserError
from multihop.common.redaction import safe_text
from multihop.data_prep.dataset.manifest import SetAside, read_data_manifest, write_manifest
from multihop.data_prep.dataset.shards import open_dataset
from multihop.eval.report.render import duration
from multihop.eval.report.run_report import as_pairs, headline, read_curves, training_time, write_report


def test_planned_and_measured_speeds_of_each_phase_and_start(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run", [])
    speed = {"micro_batch_size": 8, "tokens_per_s": 20_000.4, "mfu": 0.314, "peak_bytes": 61.25e9}
    phases = [{**speed, "phase": 0, "steps": 10}, {**speed, "phase": 1, "steps": 4, "micro_batch_size": 0}]
    plan = {"gpus": ["NVIDIA H100"], "ranks": 8, "phases": phases}
    plans = [
        {**plan, "from_step": 0},
        {"from_step": 4, "reason": "nvidia-smi names no GPU"},
        {**plan, "from_step": 6, "ranks": 4},
    ]
    rows = [
        {"step": step, "loss": 1.0, "tokens_per_s": speed, "mfu": speed / 1e5, "system/gpu_peak_memory_gb": memory}
        for step, speed, memory in [
            (2, 30_000.0, 59.0),
            (4, 20_000.0, 61.0),
            (6, 1.0, 99.0),
            (10, 19_000.0, 62.04),
            (14, 9_000.0, 70.0),
        ]
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(run)
    assert "planned" not in read_report(run)[0].tables
    (run / "plans.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plans))
    write_report(run)
    assert read_report(run)[0].tables["planned"][1:] == [
        ["1", "8 x NVIDIA H100", "0", "20,000", "25,000", "31%", "25%", "61.2 GB", "61.0 GB"],
        ["7", "4 x NVIDIA H100", "0", "20,000", "19,000", "31%", "19%", "61.2 GB", "62.0 GB"],
        ["11", "4 x NVIDIA H100", "1", "does not fit", "9,000", "-", "9%", "61.2 GB", "70.0 GB"],
    ]


def test_numbers_in_the_tables_are_those_of_the_files(tmp_path: Path, bert_data: Path) -> None:
    run = reported_run(tmp_path / "run", report_rows([0.9, 0.92, 0.88], [0.5, 0.6, 0.55]))
    (run / "data").symlink_to(bert_data)
    write_report(run)
    parsed, html, markdown = read_report(run)
    header, topics, names = parsed.tables["results"]
    assert header[3:6] == ["pretrained", "random weights", "difference"]
    assert topics == [
        "bbc-topics", "classification", "accuracy", "0.900 [0.880 to 0.920]", "0.550 [0.500 to 0.600]",
        "35.0 points [24.3 to 45.7]", "3+3 / 0+0", "0.920 (seed 1, dev 0.921)",
    ]  # fmt: skip
    assert names[3:6] == ["0.330 [0.310 to 0.360]", "0.300 [0.290 to 0.320]", "3.0 points [-2.1 to 8.1]"]
    assert f"| {' | '.join(topics)} |".replace("[", r"\[") in markdown
    ran = dict(parsed.tables["run"])
    assert ran["tokens"] == "8,123,456" and ran["train time"] == "4 min 5 s"
    assert parsed.tables["losses"] == [
        ["name", "training", "held-out"],
        ["loss", "6.500", "6.562"], ["mlm_loss", "5.900", "5.912"], ["nsp_loss", "0.600", "0.650"],
        ["nsp_accuracy", "0.700", "0.625"], ["unigram_loss", "", "6.913"], ["uniform_loss", "", "8.987"],
    ]  # fmt: skip
    assert "| mlm_loss | 5.900 | 5.912 |" in markdown
    assert ["phases[0].lr", "0.002"] in parsed.tables["recipe"]
    manifest = read_data_manifest(bert_data)
    data = dict(parsed.tables["data"])
    assert data["fingerprint"] == manifest.fingerprint
    train = manifest.totals["train"]
    assert data["training text"].startswith(f"{train.documents:,} documents")
    tokenizer = dict(parsed.tables["tokenizer"])
    assert tokenizer["kind"] == manifest.tokenizer.kind and tokenizer["vocabulary"] == "100 tokens"
    assert tokenizer["bytes per token"] == f"{train.text_bytes / train.tokens:.2f}"
    assert 1.0 <= float(tokenizer["tokens per word"]) < 10.0 and tokenizer["unknown tokens"].endswith("%")
    lengths = open_dataset(bert_data).train.lengths
    heldout = manifest.totals["heldout"].tokens
    assert parsed.tables["sources"][1] == [
        f"0: {manifest.sources[0]}", "100.0%", f"{train.documents:,}", f"{train.tokens:,}", f"{heldout:,}",
        f"{np.quantile(lengths, 0.5, method='nearest'):,} [{lengths.min():,} to {lengths.max():,}]",
    ]  # fmt: skip
    assert [line[0] for line in parsed.tables["dropped"][1:]] == list(manifest.counts)
    assert "small &lt;b&gt;" in html and "small <b>" not in html
    assert r"Some \| CPU" in markdown
    assert "Of 2 tasks, pretraining helped on 1 and was inconclusive on 1." in html
    assert "Pretrained: the checkpoint of step 2,000." in html
    assert "bbc-topics: helped." in html and "conll2003: inconclusive." in html
    assert "based on the seeds alone, without files of predictions" in html
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG") and "](loss.png)" in markdown
    assert html.count("<svg") == 1 and 'aria-label="mlm_loss and nsp_loss by step' in html and not parsed.images
    assert not [path for path in run.iterdir() if path.name.endswith(".tmp")]


@pytest.mark.parametrize(("name", "read"), [("ctc", []), ("translation", ["label_smoothing"]), ("unknown", None)])
def test_settings_of_other_objectives_are_not_listed(tmp_path: Path, name: str, read: list[str] | None) -> None:
    objective = {"mask_rate": 0.15, "label_smoothing": 0.1}
    write_report(reported_run(tmp_path / "run", [], {**RECIPE, "objective": {"name": name, **objective}}))
    listed = [key for key, *_ in read_report(tmp_path / "run")[0].tables["recipe"] if key.startswith("objective.")]
    assert listed == [f"objective.{key}" for key in ("name", *(objective if read is None else read))]


def test_it_shows_rates_losses_by_source_and_the_forecast(tmp_path: Path) -> None:
    sources = [{"path": "texts/a/*.txt", "weight": 1.0}, {"path": "<b>", "weight": 3.0}]
    recipe = {**RECIPE, "phases": [{"seq_len": 64, "steps": 100}], "data": {"sources": sources}}
    run = reported_run(tmp_path / "run", report_rows([0.9], [0.5]), recipe)
    rows: list[dict[str, Any]] = [
        {"step": step, "tokens": 100 * step, "tokens_per_s": speed, "lr": 0.1, "grad_norm": 2.0, "loss": 3.0}
        for step, speed in ((5, 10.0), (10, 20.0), (60, 50.0), (100, 100.0))
    ]
    rows += [{"step": 100, "source0/heldout_mlm_loss": 4.0, "source1/heldout_mlm_loss": 5.0}]
    rows += [{"step": 0, "source0/heldout_mlm_loss": 9.0, "source1/heldout_mlm_loss": 9.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(run)
    parsed, html, markdown = read_report(run)
    assert parsed.tables["by-source"][1:] == [["0: a/*.txt", "100", "4.000"], ["1: <b>", "100", "5.000"]]
    # The first tenth took 50 s + 25 s, the rest 100 s + 40 s.
    for text in (html, markdown):
        assert "Forecast after the first 10 of 100 steps: 12 min 30 s of training; it took 3 min 35 s." in text
    for name in ("training.png", "loss-by-source.png"):
        assert f"]({name})" in markdown and (run / name).read_bytes().startswith(b"\x89PNG")
    assert 'aria-label="learning rate, gradient norm, tokens/s by step"' in html
    assert "until step 60 it took" in training_time(rows[:3], recipe)
    assert training_time(rows[:1], recipe) == training_time(rows, RECIPE) == ""


def test_a_model_of_others_has_no_losses_of_its_own(tmp_path: Path) -> None:
    rows = report_rows([0.9, 0.92, 0.88], [0.5, 0.6, 0.55])
    run = reported_run(tmp_path / "run", rows, {**RECIPE, "eval": {**RECIPE["eval"], "checkpoint": "/models/minilm"}})
    (run / "metrics.jsonl").unlink(missing_ok=True)
    write_report(run)
    _, html, markdown = read_report(run)
    assert "Evaluation of the Hugging Face model in /models/minilm." in html
    assert "<h2>Loss</h2>" not in html and "## Loss" not in markdown and "\n\n\n" not in markdown


def test_it_shows_the_models_health_and_says_when_it_is_ill(tmp_path: Path) -> None:
    health = {"unigram_gain": 0.1449, "hidden_cosine": 0.25, "hidden_rank": 0.8123, "attention_entropy": 0.6}
    sentence = "Its last hidden states have collapsed: try a half of phases[].lr."
    run = reported_run(tmp_path / "run", [], {**RECIPE, "eval": {}}, **health, diagnosis=sentence)
    write_report(run)
    parsed, html, markdown = read_report(run)
    assert [row[:2] for row in parsed.tables["health"]] == [
        ["name", "value"], ["unigram_gain", "0.145"], ["hidden_cosine", "0.250"], ["hidden_rank", "0.812"],
        ["attention_entropy", "0.600"],
    ]  # fmt: skip
    assert html.count(sentence) == 1 and sentence.replace("[", r"\[") in markdown and html.count("<svg") == 1
    rows = [{"step": step, "heldout_mlm_loss": 6.0, **health} for step in (0, 200, 400)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(run)
    _, html, _ = read_report(run)
    _, picture = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    labels = {text.text for text in fromstring(picture).iter() if text.tag.endswith("text")}
    assert health.keys() <= labels


@pytest.mark.parametrize(
    ("audit", "verdict"),
    [
        ({"is_equal": True, "conditions": [], "first_different_step": None}, "steps 71 to 80 equal"),
        (
            {"is_equal": True, "conditions": [], "first_different_step": 75},
            "steps 71 to 80 equal, but the state of step 75 differs",
        ),
        ({"is_equal": False, "conditions": []}, "steps 71 to 80 differ"),
        (
            {"is_equal": False, "conditions": ["torch was 2.0.0"]},
            "steps 71 to 80 differ, as expected (torch was 2.0.0)",
        ),
        (
            {"is_equal": False, "conditions": ["torch was 2.0.0"], "rounding": {"is_within": True}},
            "steps 71 to 80 differ within rounding (torch was 2.0.0)",
        ),
        (
            {"is_equal": False, "conditions": ["torch was 2.0.0"], "rounding": {"is_within": False}},
            "steps 71 to 80 differ beyond rounding (torch was 2.0.0)",
        ),
        (
            {"is_equal": False, "conditions": ["torch"], "rounding": {"is_within": None, "reason": "many steps"}},
            "steps 71 to 80 differ, no verdict: many steps (torch)",
        ),
        ({"is_equal": False}, "steps 71 to 80 differ"),  # of an older version
    ],
)
def test_it_says_what_the_newest_audit_of_some_steps_found(tmp_path: Path, audit: dict[str, Any], verdict: str) -> None:
    earlier = {"first": 70, "last": 80, "is_equal": False, "conditions": ["an earlier one"]}
    write_report(reported_run(tmp_path / "run", [], audits=[earlier, {"first": 70, "last": 80, **audit}]))
    parsed, _, _ = read_report(tmp_path / "run")
    assert [row for table in parsed.tables.values() for row in table if row[0] == "audits"] == [["audits", verdict]]


def test_the_report_of_a_run_that_is_well_or_of_an_older_version_says_nothing_of_it(tmp_path: Path) -> None:
    write_report(reported_run(tmp_path / "run", [], diagnosis=None))
    parsed, html, markdown = read_report(tmp_path / "run")
    assert "health" not in parsed.tables and 'id="diagnosis"' not in html and "learning?" not in html + markdown


def test_examples_are_shown_before_and_after(tmp_path: Path) -> None:
    def mask(*tokens: str) -> list[dict[str, Any]]:
        return [{"token": token, "probability": 0.5 / (1 + place)} for place, token in enumerate(tokens)]

    run = reported_run(tmp_path / "run", [], {**RECIPE, "eval": {**RECIPE["eval"], "examples": ["The [MASK] | <b>"]}})
    write_plan_for(run, [], examples="k")
    rows = [{"text": "The [MASK] | <b>", "before": [mask("of", "the")], "after": [mask("sea", "<i>"), mask("x")]}]
    (run / "eval" / "examples.json").write_text(json.dumps({"key": "k", "checkpoint_step": 2000, "examples": rows}))
    write_report(run)
    parsed, html, markdown = read_report(run)
    expected = ["The [MASK] | <b>", "of 50%, the 25%", "sea 50%, <i> 25%; x 50%"]
    assert parsed.tables["examples"] == [["text", "before pretraining", "after"], expected]
    assert r"The \[MASK] \| &lt;b&gt; | of 50%, the 25% | sea 50%, &lt;i&gt; 25%; x 50% |" in markdown
    assert "After: the checkpoint of step 2,000." in html
    for row in rows:
        row |= {"before": "of of", "after": " and | so"}
    (run / "eval" / "examples.json").write_text(json.dumps({"key": "k", "checkpoint_step": None, "examples": rows}))
    write_report(run)
    assert read_report(run)[0].tables["examples"][1][1:] == ["… of of", "… and | so"]
    write_plan_for(run, [], examples="other")
    write_report(run)
    assert "examples" not in read_report(run)[0].tables, "they were made of another model, or of other texts"


def test_failed_and_missing_trials_are_told(tmp_path: Path) -> None:
    rows = [r for r in report_rows([0.9, None, 0.88], [None, None, None]) if r["task"] == "bbc-topics"]
    run = reported_run(tmp_path / "run", rows)
    write_report(run)
    parsed, html, markdown = read_report(run)
    assert parsed.tables["results"][1][3:7] == ["0.890 [0.880 to 0.900]", "none", "none", "2+0 / 1+3"]
    for text in (html, markdown):
        assert text.count("the loss became nan") == 4
        assert "There is no result without pretraining" in text
        assert "No trial has finished yet for: conll2003." in text


@pytest.mark.parametrize("tasks", [[], ["bbc-topics"]])
def test_a_run_without_trials_has_a_sound_report(tmp_path: Path, tasks: list[str]) -> None:
    recipe = {**RECIPE, "eval": {"tasks": tasks, "seeds": [0]}}
    run = reported_run(tmp_path / "run", [], recipe, **dict.fromkeys(LOSSES))
    (run / "metrics.jsonl").unlink()
    write_report(run)
    parsed, html, _ = read_report(run)
    assert not {"results", "losses"} & set(parsed.tables) and not parsed.images and not (run / "loss.png").exists()
    assert "No held-out loss was measured." in html and "nothing has been trained in it yet" in html
    assert ("No downstream trial has finished yet" if tasks else "The recipe has no downstream tasks") in html


def test_files_set_aside_are_named(tmp_path: Path, bert_data: Path) -> None:
    run = reported_run(tmp_path / "run", [])
    (run / "data").mkdir()
    aside = [SetAside(path=f"bad-{n}.txt", reason="not UTF-8") for n in range(60)]
    write_manifest(run / "data", read_data_manifest(bert_data).model_copy(update={"set_aside": aside}))
    write_report(run)
    _, html, markdown = read_report(run)
    for text in (html, markdown):
        assert "bad-0.txt: not UTF-8" in text and "bad-49.txt" in text and "bad-50.txt" not in text
        assert "and 10 more" in text


HOSTILE = [
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}](javascript:alert(3))",
    "a\n# Heading\n\n| x | y |\n|---|---|\n| 1 | 2 |",
    "# Heading", "- item", "1. item", "+ item", "---", "===", "> quote", "    code", "```", "`code`", "~~~", "~~gone~~",
    "**bold** _slanted_ __bold__ *slanted*", "[text](http://evil)", "![picture](http://evil)", "[text][ref]",
    "[ref]: http://evil", "<http://evil>", "&lt;b&gt; &#91;", "back\\slash \\[text](x) \\", "a | b \\| c", "- [ ] task",
    "\x1b[31mred\x07", "value0end raw0end attributes0end", "\u202etxt.exe",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_markup_in_what_is_told_is_shown_as_it_is_written(tmp_path: Path, bert_data: Path, text: str) -> None:
    recipe = {
        "name": text,
        "model": {"family": text, "layers": text, "hidden": text},
        "objective": {"name": text},
        "eval": {"tasks": [text, f"{text}2"], "seeds": [0]},
        text: text,
    }
    told = {
        **dict.fromkeys(("task", "metric", "source", "notes", "error", "reported_on"), text),
        "kind": "classification", "labels": [text, f"{text}2"], "other_metrics": {text: 0.5},
        "curve": {"loss": [[1, 0.7], [2, 0.6]]},
    }  # fmt: skip
    trials = [("pretrained", text, 0.5), ("pretrained", f"{text}2", 0.4), ("random", text, None)]
    rows = [{**report_row("t", init, 0, value), **told, "hyperparameters": {text: own}, "key": f"k{own == text}{init}"}
            for init, own, value in trials]  # fmt: skip
    run = reported_run(tmp_path / "run", rows, recipe, status=text, environment={text: text}, stages={text: 3.0})
    error = {"text": text, "target": text, "predicted": text, "probability": 0.9}
    predict(run, "kTruepretrained", {"targets": [0, 1], "predicted": [0, 0], "errors": [error]})
    (run / "metrics.jsonl").unlink()  # no picture is drawn
    (run / "data").mkdir()
    manifest = read_data_manifest(bert_data).model_copy(
        update={"set_aside": [SetAside(path=text, reason=text)], "counts": {text: {text: 3}}}
    )
    write_manifest(run / "data", manifest)
    write_report(run)
    tree = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse((run / "report.md").read_text())
    inline = [child for token in tree for child in token.children or []]
    shown_once = " ".join(safe_text(text).split())
    headings = [tree[i + 1].children for i, token in enumerate(tree) if token.type == "heading_open"]
    assert ["".join(child.content for child in heading or []) for heading in headings] == [
        shown_once, "Did pretraining help?", "Loss", "Results on the test sets", "Failed trials", shown_once, "Run",
        "Hardware and software", "Data", "Tokenizer", "What was kept and dropped", "Recipe",
    ]  # fmt: skip
    assert sum(token.type == "table_open" for token in tree) == 10
    assert {token.type.partition("_")[0] for token in tree} == {"heading", "paragraph", "inline", "bullet", "list"} | {
        "table", "thead", "tbody", "tr", "th", "td",
    }  # fmt: skip
    assert {child.type for child in inline} <= {
        "text",
        "text_special",
        "softbreak",
        "strong_open",
        "strong_close",
    }
    lines = ["".join(child.content for child in token.children or []) for token in tree if token.type == "inline"]
    assert sum(line == shown_once for line in lines) >= 7 and f"{shown_once}: {shown_once}" in lines
    parsed = Tables()
    parsed.feed((run / "report.html").read_text())
    shown = safe_text(text)
    assert parsed.tables["run"][0] == ["status", shown] and [shown, shown] in parsed.tables["recipe"]
    html = (run / "report.html").read_text()
    assert not parsed.outside and "<script" not in html and "<svg" in html
    assert parsed.tables["errors"][1] == [shown, shown, shown, "0.90"]
    assert parsed.tables["confusion"][1:] == [[shown, "1", "0"], [f"{shown}2", "1", "0"]]


def test_curves_are_the_parts_by_step_and_the_first_row_of_a_step_counts() -> None:
    rows = [
        {"step": 1, "loss": 3.7, "mlm_loss": 3.0, "sop_loss": 0.7},
        {"step": 1, "heldout_loss": 4.6, "heldout_mlm_loss": 4.0, "heldout_sop_loss": 0.6},
        {"step": 1, "mlm_loss": 2.0},
        {"step": 1, "heldout_mlm_loss": 1.0},
    ]
    language, order = read_curves(rows, SUMMARY)
    assert (language.name, language.train, language.heldout) == ("mlm_loss", {1: 3.0}, {1: 4.0})
    assert language.references == {"unigram model": 6.913, "uniform guess": 8.987}
    assert (order.name, order.train, order.heldout) == ("sop_loss", {1: 0.7}, {1: 0.6})


def test_the_headline_compares_the_language_model_part_with_both_references() -> None:
    assert headline(RECIPE, SUMMARY) == (
        "BERT with 2 layers and hidden size 128, pretrained for 2,000 steps on 8,123,456 tokens. Its held-out loss on "
        "masked tokens is 5.91 nats; a unigram model, which knows only token frequencies, has 6.91, a uniform guess "
        "8.99."
    )
    beaten = headline(RECIPE, {**SUMMARY, "heldout_mlm_loss": 7.0})
    assert "The model beats the uniform guess but not the unigram model: it has not learned" in beaten
    assert "does not beat a uniform guess" in headline(RECIPE, {**SUMMARY, "heldout_mlm_loss": 9.0})
    causal = {**dict.fromkeys(LOSSES), "heldout_clm_loss": 5.0, "unigram_loss": 6.9, "uniform_loss": 9.0}
    assert "loss on the next token is 5.00 nats" in headline(RECIPE, {**SUMMARY, **causal})


def test_a_run_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing: there is no report before training"):
        write_report(tmp_path)
    (tmp_path / "recipe.json").write_text("[1]")
    with pytest.raises(UserError, match="is not a JSON object"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("kind", "where", "settings"),
    [
        ("classification", "test", "lr 5e-05, dropout 0.0"),
        ("classification", "dev", "lr 5e-05, dropout 0.0, report_on dev"),
        ("spans", "dev", "lr 5e-05, dropout 0.0, stride 128, report_on dev"),
    ],
)
def test_settings_that_do_not_matter_for_a_task_are_not_shown(
    tmp_path: Path, kind: str, where: str, settings: str
) -> None:
    given = {"lr": 5e-5, "dropout": 0.0, "head_dropout": None, "stride": 128, "max_examples": None, "report_on": "dev"}
    rows = [
        {**report_row("t", init, 0, 0.5), "kind": kind, "reported_on": where, "hyperparameters": given}
        for init in ("pretrained", "random")
    ]
    run = reported_run(tmp_path / "run", rows, {**RECIPE, "eval": {"tasks": [{"name": "t"}], "seeds": [0]}})
    write_report(run)
    assert f"- settings, pretrained: {settings}\n" in read_report(run)[2].replace("\\", "")


def test_settings_and_durations_in_words() -> None:
    assert as_pairs({"a": {"b": [1, 2]}, "c": [{"d": None}], "e": "x", "f": {}}) == [
        ("a.b", "[1, 2]"), ("c[0].d", "null"), ("e", "x"), ("f", "{}"),
    ]  # fmt: skip
    assert [duration(s) for s in (3.21, 59.4, 61, 3599.9, 7260)] == [
        "3.2 s",
        "59.4 s",
        "1 min 1 s",
        "1 h 0 min",
        "2 h 1 min",
    ]
