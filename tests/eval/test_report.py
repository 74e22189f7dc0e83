"""The report says what the files of the run say, and the truth when it is not a nice one."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import fromstring

import pytest
from markdown_it import MarkdownIt

from common.redaction import shown
from data_prep.dataset.manifest import SetAside, read_data_manifest, write_manifest
from eval.report import as_pairs, headline, read_curves, write_report
from eval.reporting.pictures import learning_curves
from eval.reporting.render import duration

RECIPE: dict[str, Any] = {
    "name": "small <b>",
    "seed": 1,
    "model": {"preset": "bert-tiny", "family": "bert", "layers": 2, "hidden": 128},
    "objective": {"name": "mlm+nsp"},
    "phases": [{"seq_len": 64, "lr": 0.002}],
    "eval": {"tasks": ["bbc-topics", "conll2003"], "seeds": [0, 1, 2]},
}
SUMMARY: dict[str, Any] = {
    "status": "done", "steps": 2000, "tokens": 8_123_456, "unigram_loss": 6.913, "uniform_loss": 8.987,
    "train_loss": 6.5, "mlm_loss": 5.9, "nsp_loss": 0.6, "nsp_accuracy": 0.7,
    "heldout_loss": 6.562, "heldout_mlm_loss": 5.912, "heldout_nsp_loss": 0.65, "heldout_nsp_accuracy": 0.625,
    "tokens_per_s": 30_123.4,
    "stages": {"prep": 31.26, "train": 245.0, "eval": 190.0},
    "environment": {"python": "3.11.7", "torch": "2.13.0", "cpu": "Some | CPU"},
}  # fmt: skip


LOSSES = [name for name in SUMMARY if "_loss" in name or "_accuracy" in name]


class _Tables(HTMLParser):
    """The cells of each table, by its id or its last class."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.images: list[str] = []
        self.outside: list[str] = []
        self._rows: list[list[str]] = []
        self._in_cell = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            name = given.get("id") or str(given.get("class")).split()[-1]
            self._rows = self.tables.setdefault(name, [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._in_cell = True
        elif tag == "img":
            self.images.append(str(given["src"]))
        self.outside += [str(given[name]) for name in ("src", "href") if name in given]
        self.outside += [link for link in [given.get("xlink:href")] if link and not link.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self._rows[-1][-1] += data


def _row(task: str, init: str, seed: int, value: float | None) -> dict[str, Any]:
    kind, metric = ("tagging", "entity F1") if task == "conll2003" else ("classification", "accuracy")
    failed = {"status": "failed", "error": "the loss became nan"} if value is None else {"status": "ok"}
    return {
        "task": task, "kind": kind, "metric": metric, "higher_is_better": True, "value": value,
        "dev_value": value and value + 0.001, "seed": seed, "init": init, "other_metrics": {}, "source": "Some source.",
        "notes": "3 dropped", "key": f"{task}{init}{seed}", "hyperparameters": {}, "checkpoint_step": 2000,
        "seconds": 3.0, **failed,
    }  # fmt: skip


def _run(folder: Path, rows: list[dict[str, Any]], recipe: dict[str, Any] = RECIPE, **summary: Any) -> Path:
    (folder / "eval").mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    (folder / "eval" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics: list[dict[str, Any]] = [{"step": 0, "heldout_loss": 9.7, "heldout_mlm_loss": 9.0, "heldout_nsp_loss": 0.7}]
    for step in range(20, 2001, 20):
        metrics.append({"step": step, "loss": 9.7 - step / 700, "mlm_loss": 9 - step / 700, "nsp_loss": 0.7})
    metrics.append({"step": 2000, "heldout_loss": 6.562, "heldout_mlm_loss": 5.912, "heldout_nsp_loss": 0.65})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 20')
    return folder


def _predict(run: Path, key: str, content: dict[str, Any]) -> None:
    folder = run / "eval" / "predictions"
    folder.mkdir(exist_ok=True)
    (folder / f"{key}.json").write_text(json.dumps(content))


def _rows(topics: list[float | None], random_topics: list[float | None]) -> list[dict[str, Any]]:
    rows = [_row("bbc-topics", "pretrained", seed, value) for seed, value in enumerate(topics)]
    rows += [_row("bbc-topics", "random", seed, value) for seed, value in enumerate(random_topics)]
    names = [("pretrained", (0.31, 0.36, 0.33)), ("random", (0.30, 0.32, 0.29))]
    return rows + [_row("conll2003", init, seed, value) for init, values in names for seed, value in enumerate(values)]


def _read(folder: Path) -> tuple[_Tables, str, str]:
    """The tables, the HTML and the markdown; all tags closed and nothing fetched from elsewhere."""
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    parsed = _Tables()
    parsed.feed(html)
    assert all(source.startswith("data:image/png;base64,") for source in parsed.outside)
    assert not re.search(r"\{[{%]|[}%]\}|None|Undefined", html + markdown)
    return parsed, html, markdown


def test_numbers_in_the_tables_are_those_of_the_files(tmp_path: Path, bert_data: Path) -> None:
    run = _run(tmp_path / "run", _rows([0.9, 0.92, 0.88], [0.5, 0.6, 0.55]))
    (run / "data").symlink_to(bert_data)
    write_report(run)
    parsed, html, markdown = _read(run)
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
    assert data["train text"].startswith(f"{manifest.totals['train'].documents:,} documents")
    assert "small &lt;b&gt;" in html and "small <b>" not in html
    assert r"Some \| CPU" in markdown
    assert "Of 2 tasks, pretraining helped on 1 and was inconclusive on 1." in html
    assert "bbc-topics: helped." in html and "conll2003: inconclusive." in html
    assert "judged by the seeds alone, without files of predictions" in html
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG") and len(parsed.images) == 1
    assert not [path for path in run.iterdir() if path.name.endswith(".tmp")]


def test_it_shows_the_models_health_and_says_when_it_is_ill(tmp_path: Path) -> None:
    health = {"unigram_gain": 0.1449, "hidden_cosine": 0.25, "hidden_rank": 0.8123, "attention_entropy": 0.6}
    sentence = "Its last hidden states have collapsed: try a half of phases[].lr."
    run = _run(tmp_path / "run", [], {**RECIPE, "eval": {}}, **health, diagnosis=sentence)
    write_report(run)
    parsed, html, markdown = _read(run)
    assert [row[:2] for row in parsed.tables["health"]] == [
        ["name", "value"], ["unigram_gain", "0.145"], ["hidden_cosine", "0.250"], ["hidden_rank", "0.812"],
        ["attention_entropy", "0.600"],
    ]  # fmt: skip
    assert html.count(sentence) == 1 and sentence.replace("[", r"\[") in markdown and "<svg" not in html
    rows = [{"step": step, "heldout_mlm_loss": 6.0, **health} for step in (0, 200, 400)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(run)
    _, html, _ = _read(run)
    (picture,) = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    labels = {text.text for text in fromstring(picture).iter() if text.tag.endswith("text")}
    assert health.keys() <= labels


def test_the_report_of_a_run_that_is_well_or_of_an_older_version_says_nothing_of_it(tmp_path: Path) -> None:
    write_report(_run(tmp_path / "run", [], diagnosis=None))
    parsed, html, markdown = _read(tmp_path / "run")
    assert "health" not in parsed.tables and 'id="diagnosis"' not in html and "learning?" not in html + markdown


def test_it_says_which_tasks_weights_trials_started_from(tmp_path: Path) -> None:
    tasks = [{"name": "bbc-topics", "start_from": "conll2003"}, "conll2003"]
    rows = _rows([0.9, 0.92, 0.88], [0.5, 0.6, 0.55])
    for row in rows[:6]:
        row |= {"start_from": "conll2003", "source_key": f"conll2003{row['init']}{row['seed']}"}
    run = _run(tmp_path / "run", rows, {**RECIPE, "eval": {**RECIPE["eval"], "tasks": tasks}})
    write_report(run)
    parsed, html, markdown = _read(run)
    assert parsed.tables["results"][1][6] == "3+3 / 0+0"
    sentence = "bbc-topics: Some source. 3 dropped; trials start from the weights that were fine-tuned on conll2003."
    assert sentence in html and sentence in markdown


def test_it_says_when_pretraining_did_not_help(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _rows([0.5, 0.52, 0.48], [0.8, 0.9, 0.85]), heldout_mlm_loss=6.95)
    write_report(run)
    parsed, html, markdown = _read(run)
    assert parsed.tables["results"][1][5].startswith("-35.0 points [")
    for text in (html, markdown):
        assert "did not help on 1" in text and "worse with pretraining by 35.0 points" in text
        assert "it has not learned to use context" in text
        assert "helped on 1, did not" not in text


def test_with_one_start_alone_nothing_is_said_of_pretraining(tmp_path: Path) -> None:
    recipe = {**RECIPE, "eval": {**RECIPE["eval"], "starts": ["pretrained"]}}
    rows = [row for row in _rows([0.5, 0.52, 0.51], []) if row["init"] == "pretrained"]
    write_report(_run(tmp_path, rows, recipe))
    _, html, markdown = _read(tmp_path)
    for text in (html, markdown):
        assert "eval.starts: [pretrained]" in text.replace("\\", "") and "inconclusive" not in text
        assert "Did pretraining help?" not in text and "conll2003" in text


def test_a_section_among_the_settings_is_shown_key_by_key(tmp_path: Path) -> None:
    features = {"layers": [-2, -1], "combine": "concat", "head": "bilstm"}
    rows = [{**row, "hyperparameters": {"lr": 1e-3, "features": features}} for row in _rows([0.9], [0.5])]
    write_report(_run(tmp_path / "run", rows))
    for text in _read(tmp_path / "run")[1:]:
        assert "lr 0.001, features.layers [-2, -1], features.combine concat, features.head bilstm" in text.replace(
            "\\[", "["
        )


def _grid_run(folder: Path) -> Path:
    """A task with two rates, two checkpoints, curves and files of predictions of 40 examples."""
    rows = []
    for init, step, lr, right in (
        ("pretrained", 1000, 3e-4, 30), ("pretrained", 2000, 3e-4, 36), ("pretrained", 2000, 1e-4, 38),
        ("random", None, 3e-4, 20), ("random", None, 1e-4, 10),
    ):  # fmt: skip
        for seed in range(3):
            row = _row("glue/sst2", init, seed, right / 40)
            dev = right / 40 - (0.3 if (init, lr) == ("pretrained", 1e-4) else 0) + seed / 100
            row |= {
                "dev_value": dev, "hyperparameters": {"lr": lr, "epochs": 3.0}, "checkpoint_step": step,
                "key": f"k{init}{step}{int(lr * 1e4)}{seed}", "labels": ["bad", "good"], "reported_on": "half of dev",
                "curve": {"loss": [[n, 1 / n] for n in range(1, 401)], "dev": [[200, 0.5], [400, dev]]},
                "other_metrics": {"largest class": 0.5}, "seconds": 60.0,
            }  # fmt: skip
            rows.append(row)
    recipe = {**RECIPE, "eval": {"tasks": [{"name": "glue/sst2"}], "seeds": [0, 1, 2], "lr": [3e-4, 1e-4]}}
    run = _run(folder, rows, recipe)
    for row in rows:
        right = round(row["value"] * 40)
        _predict(run, row["key"], {
            "statistics": [[float(i < right), 1.0] for i in range(40)],
            "targets": [i % 2 for i in range(40)],
            "predicted": [i % 2 if i < right else 1 - i % 2 for i in range(40)],
            "errors": [{"text": ["one", "two"], "target": "bad", "predicted": "good", "probability": p}
                       for p in (0.6, 0.9)],
        })  # fmt: skip
    return run


def test_a_task_has_its_settings_grid_published_scores_pictures_and_errors(tmp_path: Path) -> None:
    run = _grid_run(tmp_path / "run")
    write_report(run)
    parsed, html, markdown = _read(run)
    # The rate with the better test score has the worse development score; the first checkpoint is not judged.
    assert parsed.tables["results"][1][2:5] == [
        "accuracy, on half of dev",
        "0.900 [0.900 to 0.900]",
        "0.500 [0.500 to 0.500]",
    ]
    assert parsed.tables["results"][1][7] == "0.900 (seed 2, dev 0.920)"
    assert parsed.tables["grid"][1:] == [
        ["pretrained", "lr 0.0003", "0.910", "0.900 [0.900 to 0.900]", "3 / 0", "chosen"],
        ["pretrained", "lr 0.0001", "0.660", "0.950 [0.950 to 0.950]", "3 / 0", ""],
        ["random weights", "lr 0.0003", "0.510", "0.500 [0.500 to 0.500]", "3 / 0", "chosen"],
        ["random weights", "lr 0.0001", "0.260", "0.250 [0.250 to 0.250]", "3 / 0", ""],
    ]
    assert parsed.tables["published"][1:] == [
        ["BERT-tiny", "accuracy", "0.832", "GLUE test", "google-research/bert, README"]
    ]
    assert parsed.tables["confusion"][1:] == [["bad", "18", "2"], ["good", "2", "18"]]
    assert [line[-1] for line in parsed.tables["errors"][1:]] == ["0.90", "0.60"]
    assert "judged by 40 test examples and 3 + 3 seeds" in html and "15 trials took 15 min 0 s in all" in html
    assert html.count("<svg") == 3 and "The accuracy by the pretraining step" in html
    for text in (html, markdown):
        assert "settings, pretrained" in text and "BERT-tiny" in text and "largest class" in text
    tree = MarkdownIt("commonmark").enable("table").parse(markdown)
    assert sum(token.type == "table_open" for token in tree) == 8
    before = html
    write_report(run)
    assert (run / "report.html").read_text() == before, "the same files give the same page"


def test_pictures_follow_the_page_and_stay_small(tmp_path: Path) -> None:
    run = _grid_run(tmp_path / "run")
    write_report(run)
    pictures = re.findall(r"<svg .*?</svg>", (run / "report.html").read_text(), re.DOTALL)
    pictures += [learning_curves(name, "score", {"pretrained": [[(1, 0.5), (2, 0.6)]]}) for name in ("one", "other")]
    for picture in pictures:
        assert len(picture) < 40_000 and "var(--first)" in picture and "var(--ink)" in picture
        assert not re.search(r"#01020|<script|<image|<metadata|xlink:href=\"(?!#)", picture)
        fromstring(picture)
    ids = re.findall(r' id="([^"]*)"', "".join(pictures))
    assert len(ids) == len(set(ids))


def test_failed_and_missing_trials_are_told(tmp_path: Path) -> None:
    rows = [r for r in _rows([0.9, None, 0.88], [None, None, None]) if r["task"] == "bbc-topics"]
    run = _run(tmp_path / "run", rows)
    write_report(run)
    parsed, html, markdown = _read(run)
    assert parsed.tables["results"][1][3:7] == ["0.890 [0.880 to 0.900]", "none", "none", "2+0 / 1+3"]
    for text in (html, markdown):
        assert text.count("the loss became nan") == 4
        assert "There is no result without pretraining" in text
        assert "No trial has finished yet for: conll2003." in text


@pytest.mark.parametrize("tasks", [[], ["bbc-topics"]])
def test_a_run_without_trials_has_a_sound_report(tmp_path: Path, tasks: list[str]) -> None:
    recipe = {**RECIPE, "eval": {"tasks": tasks, "seeds": [0]}}
    run = _run(tmp_path / "run", [], recipe, **dict.fromkeys(LOSSES))
    (run / "metrics.jsonl").unlink()
    write_report(run)
    parsed, html, _ = _read(run)
    assert not {"results", "losses"} & set(parsed.tables) and not parsed.images and not (run / "loss.png").exists()
    assert "No held-out loss was measured." in html and "nothing has been pretrained in it yet" in html
    assert ("No downstream trial has finished yet" if tasks else "The recipe has no downstream tasks") in html


def test_files_set_aside_are_named(tmp_path: Path, bert_data: Path) -> None:
    run = _run(tmp_path / "run", [])
    (run / "data").mkdir()
    aside = [SetAside(path=f"bad-{n}.txt", reason="not UTF-8") for n in range(60)]
    write_manifest(run / "data", read_data_manifest(bert_data).model_copy(update={"set_aside": aside}))
    write_report(run)
    _, html, markdown = _read(run)
    for text in (html, markdown):
        assert "bad-0.txt: not UTF-8" in text and "bad-49.txt" in text and "bad-50.txt" not in text
        assert "and 10 more" in text


HOSTILE = [
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{7*7}}](javascript:alert(3))",
    "a\n# Heading\n\n| x | y |\n|---|---|\n| 1 | 2 |",
    "# Heading", "- item", "1. item", "+ item", "---", "===", "> quote", "    code", "```", "`code`", "~~~", "~~gone~~",
    "**bold** _slanted_ __bold__ *slanted*", "[text](http://evil)", "![picture](http://evil)", "[text][ref]",
    "[ref]: http://evil", "<http://evil>", "&lt;b&gt; &#91;", "back\\slash \\[text](x) \\", "a | b \\| c", "- [ ] task",
    "\x1b[31mred\x07", "\u202etxt.exe",
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
    rows = [{**_row("t", init, 0, value), **told, "hyperparameters": {text: own}, "key": f"k{own == text}{init}"}
            for init, own, value in trials]  # fmt: skip
    run = _run(tmp_path / "run", rows, recipe, status=text, environment={text: text}, stages={text: 3.0})
    error = {"text": text, "target": text, "predicted": text, "probability": 0.9}
    _predict(run, "kTruepretrained", {"targets": [0, 1], "predicted": [0, 0], "errors": [error]})
    (run / "metrics.jsonl").unlink()  # no picture is drawn
    (run / "data").mkdir()
    manifest = read_data_manifest(bert_data).model_copy(
        update={"set_aside": [SetAside(path=text, reason=text)], "counts": {text: {text: 3}}}
    )
    write_manifest(run / "data", manifest)
    write_report(run)
    tree = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse((run / "report.md").read_text())
    inline = [child for token in tree for child in token.children or []]
    shown_once = " ".join(shown(text).split())
    headings = [tree[i + 1].children for i, token in enumerate(tree) if token.type == "heading_open"]
    assert ["".join(child.content for child in heading or []) for heading in headings] == [
        shown_once, "Did pretraining help?", "Loss", "Results on the test sets", "Failed trials", shown_once, "Run",
        "Hardware and software", "Data", "Recipe",
    ]  # fmt: skip
    assert sum(token.type == "table_open" for token in tree) == 8
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
    parsed = _Tables()
    parsed.feed((run / "report.html").read_text())
    assert parsed.tables["run"][0] == ["status", text] and [text, text] in parsed.tables["recipe"]
    html = (run / "report.html").read_text()
    assert not parsed.outside and "<script" not in html and "<svg" in html
    assert parsed.tables["errors"][1] == [text, text, text, "0.90"]
    assert parsed.tables["confusion"][1:] == [[text, "1", "0"], [f"{text}2", "1", "0"]]


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
    with pytest.raises(ValueError, match="is missing: there is no report before training"):
        write_report(tmp_path)
    (tmp_path / "recipe.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("kind", "where", "shown"),
    [
        ("classification", "test", "lr 5e-05, dropout 0.0"),
        ("classification", "dev", "lr 5e-05, dropout 0.0, report_on dev"),
        ("spans", "dev", "lr 5e-05, dropout 0.0, stride 128, report_on dev"),
    ],
)
def test_settings_that_do_not_matter_for_a_task_are_not_shown(
    tmp_path: Path, kind: str, where: str, shown: str
) -> None:
    given = {"lr": 5e-5, "dropout": 0.0, "head_dropout": None, "stride": 128, "max_examples": None, "report_on": "dev"}
    rows = [
        {**_row("t", init, 0, 0.5), "kind": kind, "reported_on": where, "hyperparameters": given}
        for init in ("pretrained", "random")
    ]
    run = _run(tmp_path / "run", rows, {**RECIPE, "eval": {"tasks": [{"name": "t"}], "seeds": [0]}})
    write_report(run)
    assert f"- settings, pretrained: {shown}\n" in _read(run)[2].replace("\\", "")


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
