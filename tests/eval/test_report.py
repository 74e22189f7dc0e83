"""The report says what the files of the run say, and the truth when it is not a nice one."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from data_prep.manifest import SetAside, read_manifest, write_manifest
from data_prep.shown import shown
from eval.report import as_pairs, duration, headline, read_curve, write_report

RECIPE: dict[str, Any] = {
    "name": "small <b>",
    "seed": 1,
    "model": {"preset": "bert-tiny", "family": "bert", "layers": 2, "hidden": 128},
    "objective": {"name": "mlm+nsp"},
    "phases": [{"seq_len": 64, "lr": 0.002}],
    "eval": {"tasks": ["bbc-topics", "conll2003"], "seeds": [0, 1, 2]},
}
SUMMARY: dict[str, Any] = {
    "status": "done", "steps": 2000, "tokens": 8_123_456, "train_loss": 5.9, "heldout_loss": 5.912,
    "unigram_loss": 6.913, "uniform_loss": 8.987, "tokens_per_s": 30_123.4,
    "stages": {"prep": 31.26, "train": 245.0, "eval": 190.0},
    "environment": {"python": "3.11.7", "torch": "2.13.0", "cpu": "Some | CPU"},
}  # fmt: skip


class _Tables(HTMLParser):
    """The cells of each table, by its id."""

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
            self._rows = self.tables.setdefault(str(given.get("id")), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._in_cell = True
        elif tag == "img":
            self.images.append(str(given["src"]))
        self.outside += [str(given[name]) for name in ("src", "href") if name in given]

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
    metrics: list[dict[str, Any]] = [{"step": 0, "heldout_loss": 9.0}]
    metrics += [{"step": step, "loss": 9.0, "token_loss": 9 - step / 700, "tokens": 1} for step in range(20, 2001, 20)]
    metrics.append({"step": 2000, "heldout_loss": 5.912})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 20')
    return folder


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
        "bbc-topics", "classification", "accuracy", "0.900 [0.880 to 0.920]", "0.550 [0.500 to 0.600]", "+0.350",
        "3+3 / 0+0", "0.920 (seed 1, dev 0.921)",
    ]  # fmt: skip
    assert names[3:6] == ["0.330 [0.310 to 0.360]", "0.300 [0.290 to 0.320]", "+0.030"]
    assert f"| {' | '.join(topics)} |".replace("[", r"\[") in markdown
    ran = dict(parsed.tables["run"])
    assert ran["pieces"] == "8,123,456" and ran["time of train"] == "4 min 5 s" and ran["heldout loss"] == "5.912"
    assert ["phases[0].lr", "0.002"] in parsed.tables["recipe"]
    manifest = read_manifest(bert_data)
    data = dict(parsed.tables["data"])
    assert data["fingerprint"] == manifest.fingerprint
    assert data["train text"].startswith(f"{manifest.totals['train'].documents:,} documents")
    assert "small &lt;b&gt;" in html and "small <b>" not in html
    assert r"Some \| CPU" in markdown
    assert "Of 2 tasks tried, pretraining helped on 1, cannot be told apart from random weights on 1." in html
    assert "bbc-topics: helped." in html and "conll2003: cannot be told." in html
    assert "stay apart by chance alone in 10% of cases" in html
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG") and len(parsed.images) == 1
    assert not [path for path in run.iterdir() if path.name.endswith(".tmp")]


def test_it_says_when_pretraining_did_not_help(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _rows([0.5, 0.52, 0.48], [0.8, 0.9, 0.85]), heldout_loss=6.95)
    write_report(run)
    parsed, html, markdown = _read(run)
    assert parsed.tables["results"][1][5] == "-0.350"
    for text in (html, markdown):
        assert "did not help on 1" in text and "the best seed with it loses to the worst without" in text
        assert "it has not learnt to use the context" in text
        assert "helped on 1, did not" not in text


def test_failed_and_missing_trials_are_told(tmp_path: Path) -> None:
    rows = [r for r in _rows([0.9, None, 0.88], [None, None, None]) if r["task"] == "bbc-topics"]
    run = _run(tmp_path / "run", rows)
    write_report(run)
    parsed, html, markdown = _read(run)
    assert parsed.tables["results"][1][3:7] == ["0.890 [0.880 to 0.900]", "none", "none", "2+0 / 1+3"]
    for text in (html, markdown):
        assert text.count("the loss became nan") == 4
        assert "No trial without pretraining ended with a result" in text
        assert "No trial has ended yet of: conll2003." in text


@pytest.mark.parametrize("tasks", [[], ["bbc-topics"]])
def test_a_run_without_trials_has_a_sound_report(tmp_path: Path, tasks: list[str]) -> None:
    recipe = {**RECIPE, "eval": {"tasks": tasks, "seeds": [0]}}
    run = _run(tmp_path / "run", [], recipe, heldout_loss=None, unigram_loss=None, uniform_loss=None, train_loss=None)
    (run / "metrics.jsonl").unlink()
    write_report(run)
    parsed, html, _ = _read(run)
    assert "results" not in parsed.tables and not parsed.images and not (run / "loss.png").exists()
    assert "No held-out loss was measured." in html and "metrics.jsonl holds no losses" in html
    assert ("No trial of a downstream task has ended yet" if tasks else "No downstream task was asked for") in html


def test_files_set_aside_are_named(tmp_path: Path, bert_data: Path) -> None:
    run = _run(tmp_path / "run", [])
    (run / "data").mkdir()
    aside = [SetAside(path=f"bad-{n}.txt", reason="not UTF-8") for n in range(60)]
    write_manifest(run / "data", read_manifest(bert_data).model_copy(update={"set_aside": aside}))
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
    told = {"task": text, "kind": text, "metric": text, "source": text, "notes": text, "error": text}
    rows = [{**_row("t", init, 0, value), **told} for init, value in (("pretrained", 0.5), ("random", None))]
    run = _run(tmp_path / "run", rows, recipe, status=text, environment={text: text}, stages={text: 3.0})
    (run / "metrics.jsonl").unlink()  # no picture is drawn
    (run / "data").mkdir()
    manifest = read_manifest(bert_data).model_copy(
        update={"set_aside": [SetAside(path=text, reason=text)], "counts": {text: {text: 3}}}
    )
    write_manifest(run / "data", manifest)
    write_report(run)
    tree = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse((run / "report.md").read_text())
    inline = [child for token in tree for child in token.children or []]
    shown_once = " ".join(shown(text).split())
    headings = [tree[i + 1].children for i, token in enumerate(tree) if token.type == "heading_open"]
    assert ["".join(child.content for child in heading or []) for heading in headings] == [
        shown_once, "Did pretraining help?", "Loss", "Results on the test sets", "Trials that failed",
        "What ran on what", "Hardware and software", "Data", "Recipe",
    ]  # fmt: skip
    assert sum(token.type == "table_open" for token in tree) == 5
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
    assert not parsed.outside and "<script" not in (run / "report.html").read_text()


def test_the_first_row_of_a_step_wins() -> None:
    rows = [{"step": 1, "token_loss": 3.0}, {"step": 1, "heldout_loss": 4.0}, {"step": 1, "token_loss": 2.0}]
    rows.append({"step": 1, "heldout_loss": 1.0})
    curve = read_curve(rows, SUMMARY)
    assert (curve.train, curve.heldout, curve.unigram, curve.uniform) == ({1: 3.0}, {1: 4.0}, 6.913, 8.987)


def test_the_headline_compares_with_both_references() -> None:
    assert headline(RECIPE, SUMMARY).startswith(
        "A BERT of 2 layers, 128 wide, was pretrained for 2,000 steps on 8,123,456"
    )
    assert "loss of 5.91 nats; a model that only knows how frequent each piece is has 6.91" in headline(RECIPE, SUMMARY)
    assert "beats a uniform guess (8.99) but is no better" in headline(RECIPE, {**SUMMARY, "heldout_loss": 7.0})
    assert "does not even beat a uniform guess" in headline(RECIPE, {**SUMMARY, "heldout_loss": 9.0})


def test_a_run_directory_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is missing; a report needs a run"):
        write_report(tmp_path)
    (tmp_path / "recipe.json").write_text("[1]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        write_report(tmp_path)


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
