"""Runs with made-up numbers for tests of the report, and a reader of the report."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from evaluation_plans import write_plan_for

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


class Tables(HTMLParser):
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


def report_row(task: str, init: str, seed: int, value: float | None) -> dict[str, Any]:
    kind, metric = ("tagging", "entity F1") if task == "conll2003" else ("classification", "accuracy")
    failed = {"status": "failed", "error": "the loss became nan"} if value is None else {"status": "ok"}
    return {
        "task": task, "kind": kind, "metric": metric, "higher_is_better": True, "value": value,
        "dev_value": value and value + 0.001, "seed": seed, "init": init, "other_metrics": {}, "source": "Some source.",
        "notes": "3 dropped", "key": f"{task}{init}{seed}", "hyperparameters": {}, "checkpoint_step": 2000,
        "seconds": 3.0, **failed,
    }  # fmt: skip


def reported_run(folder: Path, rows: list[dict[str, Any]], recipe: dict[str, Any] = RECIPE, **summary: Any) -> Path:
    (folder / "eval").mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    (folder / "eval" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_plan_for(folder, rows)
    metrics: list[dict[str, Any]] = [{"step": 0, "heldout_loss": 9.7, "heldout_mlm_loss": 9.0, "heldout_nsp_loss": 0.7}]
    for step in range(20, 2001, 20):
        metrics.append({"step": step, "loss": 9.7 - step / 700, "mlm_loss": 9 - step / 700, "nsp_loss": 0.7})
    metrics.append({"step": 2000, "heldout_loss": 6.562, "heldout_mlm_loss": 5.912, "heldout_nsp_loss": 0.65})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 20')
    return folder


def predict(run: Path, key: str, content: dict[str, Any]) -> None:
    folder = run / "eval" / "predictions"
    folder.mkdir(exist_ok=True)
    (folder / f"{key}.json").write_text(json.dumps(content))


def report_rows(topics: list[float | None], random_topics: list[float | None]) -> list[dict[str, Any]]:
    rows = [report_row("bbc-topics", "pretrained", seed, value) for seed, value in enumerate(topics)]
    rows += [report_row("bbc-topics", "random", seed, value) for seed, value in enumerate(random_topics)]
    names = [("pretrained", (0.31, 0.36, 0.33)), ("random", (0.30, 0.32, 0.29))]
    return rows + [
        report_row("conll2003", init, seed, value) for init, values in names for seed, value in enumerate(values)
    ]


def read_report(folder: Path) -> tuple[Tables, str, str]:
    """Return the tables, the HTML and the Markdown; asserts that nothing is loaded from elsewhere."""
    html, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    parsed = Tables()
    parsed.feed(html)
    assert all(source.startswith("data:image/png;base64,") for source in parsed.outside)
    assert not re.search(r"\{[{%]|[}%]\}|None|Undefined", html + markdown)
    return parsed, html, markdown
