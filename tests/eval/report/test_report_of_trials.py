"""The report's sections on the trials: verdicts, settings, grids, pictures and errors."""

import re
from pathlib import Path
from xml.etree.ElementTree import fromstring

import pytest
from evaluation_plans import write_plan_for
from markdown_it import MarkdownIt
from reported_runs import RECIPE, predict, read_report, report_row, report_rows, reported_run

from multihop.eval.report import task_section
from multihop.eval.report.plots import learning_curves
from multihop.eval.report.run_report import write_report
from multihop.eval.statistics.verdict import TaskResult


def test_it_says_which_tasks_weights_trials_started_from(tmp_path: Path) -> None:
    tasks = [{"name": "bbc-topics", "start_from": "conll2003"}, "conll2003"]
    rows = report_rows([0.9, 0.92, 0.88], [0.5, 0.6, 0.55])
    for row in rows[:6]:
        row |= {"start_from": "conll2003", "source_key": f"conll2003{row['init']}{row['seed']}"}
    run = reported_run(tmp_path / "run", rows, {**RECIPE, "eval": {**RECIPE["eval"], "tasks": tasks}})
    write_report(run)
    parsed, html, markdown = read_report(run)
    assert parsed.tables["results"][1][6] == "3+3 / 0+0"
    sentence = "bbc-topics: Some source. 3 dropped; trials start from the weights that were fine-tuned on conll2003."
    assert sentence in html and sentence in markdown


def test_it_says_when_pretraining_did_not_help(tmp_path: Path) -> None:
    run = reported_run(tmp_path / "run", report_rows([0.5, 0.52, 0.48], [0.8, 0.9, 0.85]), heldout_mlm_loss=6.95)
    write_report(run)
    parsed, html, markdown = read_report(run)
    assert parsed.tables["results"][1][5].startswith("-35.0 points [")
    for text in (html, markdown):
        assert "did not help on 1" in text and "worse with pretraining by 35.0 points" in text
        assert "it has not learned to use context" in text
        assert "helped on 1, did not" not in text


def test_a_model_that_translates_is_trained_and_not_pretrained(tmp_path: Path) -> None:
    section = {"tasks": ["news.yaml"], "seeds": [0]}
    recipe = {**RECIPE, "model": {**RECIPE["model"], "family": "transformer"}, "eval": section}
    changes = {
        "kind": "translation",
        "metric": "BLEU",
        "hyperparameters": {"beams": 4, "seq_len": 128},
        "dev_value": None,
    }
    rows = [report_row("news", init, 0, value) | changes for init, value in (("pretrained", 9.7), ("random", 0.1))]
    run = reported_run(tmp_path / "run", rows, recipe)
    for row, matches in zip(rows, (4, 1), strict=True):
        predict(run, row["key"], {"statistics": [[5, 5, *[matches] * 4, 5, 4, 3, 2]] * 30})
    write_report(run)
    parsed, html, markdown = read_report(run)
    assert parsed.tables["results"][0][3] == "trained" and "Transformer with 2 layers" in html
    for text in (html, markdown):
        assert "Did training help?" in text and "Of 1 task, training helped on 1." in text
        assert "better with training by" in text and "pretrain" not in text.split("Hardware")[0]
        assert "fine-tun" not in text and "trained for 2,000 steps" in text
        assert "beams 4" in text and "seq_len 128" not in text, "a translation is as long as the model says"
        assert "Published scores on another data set" in text and "of models of this size" not in text
    scores = ["Transformer-base", "BLEU", "27.3", "WMT 2014, English to German", "Vaswani et al. 2017, table 2"]
    assert parsed.tables["published"][1] == scores and f"| {' | '.join(scores)} |" in markdown


def test_a_continued_model_is_compared_with_its_parent(tmp_path: Path) -> None:
    starts = ["pretrained", "parent", "random"]
    recipe = {**RECIPE, "model": {**RECIPE["model"], "init_from": "runs/<parent>"}}
    rows = report_rows([0.9, 0.92, 0.88], [0.5, 0.6, 0.55])
    write_report(reported_run(tmp_path / "two", rows, recipe))
    for text in read_report(tmp_path / "two")[1:]:
        assert "initialized from runs/&lt;parent&gt; (model.init" in text
        assert "add parent to eval.inits to see what this run added" in text

    rows += [report_row("bbc-topics", "parent", seed, value) for seed, value in enumerate((0.7, 0.72, 0.71))]
    rows += [report_row("conll2003", "parent", seed, value) for seed, value in enumerate((0.31, 0.36, 0.33))]
    write_report(reported_run(tmp_path / "three", rows, {**recipe, "eval": {**recipe["eval"], "inits": starts}}))
    parsed, html, markdown = read_report(tmp_path / "three")
    header, topics, _ = parsed.tables["results"]
    assert header[3:8] == ["pretrained", "parent", "difference to parent", "random weights", "difference"]
    assert (
        topics[4] == "0.710 [0.700 to 0.720]" and topics[5].startswith("19.0 points [") and topics[8] == "3+3+3 / 0+0+0"
    )
    for text in (html, markdown):
        assert "Did pretraining help?" in text and "Did continued pretraining help?" in text
        assert "continued pretraining helped on 1 and was inconclusive on 1" in text
        assert "better with continued pretraining by 19.0 points" in text


def test_f1_names_its_positive_class(tmp_path: Path) -> None:
    rows = [row | {"metric": "F1", "labels": ["ham", "spam"]} for row in report_rows([0.9], [0.5])]
    write_report(reported_run(tmp_path / "run", rows))
    assert read_report(tmp_path / "run")[0].tables["results"][1][2] == "F1 of the class spam"


def test_with_one_start_alone_nothing_is_said_of_pretraining(tmp_path: Path) -> None:
    recipe = {**RECIPE, "eval": {**RECIPE["eval"], "inits": ["pretrained"]}}
    rows = [row for row in report_rows([0.5, 0.52, 0.51], []) if row["init"] == "pretrained"]
    write_report(reported_run(tmp_path, rows, recipe))
    _, html, markdown = read_report(tmp_path)
    for text in (html, markdown):
        assert "eval.inits: [pretrained]" in text.replace("\\", "") and "inconclusive" not in text
        assert "Did pretraining help?" not in text and "conll2003" in text


def test_a_section_among_the_settings_is_shown_key_by_key(tmp_path: Path) -> None:
    features = {"layers": [-2, -1], "combine": "concat", "head": "bilstm"}
    rows = [{**row, "hyperparameters": {"lr": 1e-3, "features": features}} for row in report_rows([0.9], [0.5])]
    write_report(reported_run(tmp_path / "run", rows))
    for text in read_report(tmp_path / "run")[1:]:
        assert "lr 0.001, features.layers [-2, -1], features.combine concat, features.head bilstm" in text.replace(
            "\\[", "["
        )


def test_learned_weights_of_the_layers_are_shown(tmp_path: Path) -> None:
    rows = report_rows([0.9, 0.8], [0.5])
    for row in rows:
        shares = {"0": 0.25, "2": 0.75} if row["init"] == "pretrained" else {"0": 0.5, "2": 0.5}
        row["layer_weights"] = {"below": shares}
    write_report(reported_run(tmp_path / "run", rows))
    markdown = read_report(tmp_path / "run")[2]
    assert "| embeddings | 0.250" in markdown and "| layer 2 | 0.750" in markdown
    rows[0]["layer_weights"]["above"] = {"0": 0.1, "2": 0.9}
    write_report(reported_run(tmp_path / "other", rows))
    assert "| layer 2, above the BiLSTM | 0.900 | none |" in read_report(tmp_path / "other")[2]


def _grid_run(folder: Path) -> Path:
    """Make a run with a task that has two rates, two checkpoints, curves and predictions of 40 examples."""
    rows = []
    for init, step, lr, right in (
        ("pretrained", 1000, 3e-4, 30), ("pretrained", 2000, 3e-4, 36), ("pretrained", 2000, 1e-4, 38),
        ("random", None, 3e-4, 20), ("random", None, 1e-4, 10),
    ):  # fmt: skip
        for seed in range(3):
            row = report_row("glue/sst2", init, seed, right / 40)
            dev = right / 40 - (0.3 if (init, lr) == ("pretrained", 1e-4) else 0) + seed / 100
            row |= {
                "dev_value": dev, "hyperparameters": {"lr": lr, "epochs": 3.0}, "checkpoint_step": step,
                "key": f"k{init}{step}{int(lr * 1e4)}{seed}", "labels": ["bad", "good"], "reported_on": "half of dev",
                "curve": {"loss": [[n, 1 / n] for n in range(1, 401)], "dev": [[200, 0.5], [400, dev]]},
                "other_metrics": {"largest class": 0.5}, "seconds": 60.0,
            }  # fmt: skip
            rows.append(row)
    recipe = {**RECIPE, "eval": {"tasks": [{"name": "glue/sst2"}], "seeds": [0, 1, 2], "lr": [3e-4, 1e-4]}}
    run = reported_run(folder, rows, recipe)
    earlier = [row for row in rows if row["checkpoint_step"] == 1000]
    write_plan_for(run, [row for row in rows if row not in earlier], earlier)
    for row in rows:
        right = round(row["value"] * 40)
        predict(run, row["key"], {
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
    parsed, html, markdown = read_report(run)
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
    assert "based on 40 test examples and 3 + 3 seeds" in html and "12 trials took 12 min 0 s in all" in html
    assert html.count("<svg") == 4 and "The accuracy by the pretraining step" in html
    for text in (html, markdown):
        assert "settings, pretrained" in text and "BERT-tiny" in text and "largest class" in text
    tree = MarkdownIt("commonmark").enable("table").parse(markdown)
    assert sum(token.type == "table_open" for token in tree) == 8
    before = html
    write_report(run)
    assert (run / "report.html").read_text() == before, "the same files give the same page"


def test_a_larger_grid_is_searched_once_for_what_differs_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    search = task_section._varied

    def counted(result: TaskResult) -> list[str]:
        searched.append(result.task)
        return search(result)

    monkeypatch.setattr(task_section, "_varied", counted)
    rows = [
        {**report_row("bbc-topics", "pretrained", 0, 0.5), "hyperparameters": {"lr": number / 8}, "key": str(number)}
        for number in range(1, 41)
    ]
    write_report(reported_run(tmp_path / "run", rows))
    assert searched == ["bbc-topics"]
    assert len(read_report(tmp_path / "run")[0].tables["grid"]) == 41


def test_pictures_follow_the_page_and_stay_small(tmp_path: Path) -> None:
    run = _grid_run(tmp_path / "run")
    write_report(run)
    pictures = re.findall(r"<svg .*?</svg>", (run / "report.html").read_text(), re.DOTALL)
    pictures += [
        learning_curves(name, "score", "a score", {"pretrained": [[(1, 0.5), (2, 0.6)]]}) for name in ("one", "other")
    ]
    for picture in pictures:
        assert len(picture) < 40_000 and "var(--first)" in picture and "var(--ink)" in picture
        assert not re.search(r"#01020|<script|<image|<metadata|xlink:href=\"(?!#)", picture)
        fromstring(picture)
    ids = re.findall(r' id="([^"]*)"', "".join(pictures))
    assert len(ids) == len(set(ids))
