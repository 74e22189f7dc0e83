"""The report of several runs agrees with their files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation_plans import write_plan_for
from made_up_runs import make_run, with_predictions
from markdown_it import MarkdownIt

from multihop.common.errors import UserError
from multihop.common.json_lines import append_row, read_rows
from multihop.eval.report.compared_runs import read_runs
from multihop.eval.report.comparison import write_comparison
from multihop.eval.report.run_metrics import training_clock


def _trained(run: Path, speed: float, unigram: float = 6.5, **recipe: Any) -> Path:
    """Add 20 logged steps of 100 tokens to a run; `recipe` has keys of the first phase. Returns the run's folder."""
    for step in range(1, 21):
        append_row(run / "metrics.jsonl", {"step": step, "tokens": 100 * step, "tokens_per_s": speed, "time": 1.8e9})
    append_row(run / "metrics.jsonl", {"step": 20, "heldout_mlm_loss": 5.0 - speed / 1000})
    told = {"status": "done", "unigram_loss": unigram, "uniform_loss": 9.0, "environment": {"cpu": "Some | CPU"}}
    (run / "summary.json").write_text(json.dumps(told))
    content = json.loads((run / "recipe.json").read_text())
    content["phases"][0] |= recipe
    (run / "recipe.json").write_text(json.dumps(content))
    return run


def _tables(markdown: str) -> dict[str, list[list[str]]]:
    """Return the cells of each table, by its last header."""
    tables: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open"):
            rows[-1].append("")
        elif token.type == "inline" and rows and not rows[-1][-1]:
            rows[-1][-1] = "".join(child.content for child in token.children or [])
        elif token.type == "table_close":
            tables[rows[0][-1]], rows = rows[1:], []
    return tables


def _report(runs: Sequence[Path], out: Path, **given: Any) -> tuple[dict[str, list[list[str]]], str, str]:
    write_comparison(runs, out, "sizes", **given)
    markdown, html = (out / "report.md").read_text(), (out / "report.html").read_text()
    for picture in out.glob("*.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and f"]({picture.name})" in markdown
    assert markdown.count("](") == html.count("<svg") == len(list(out.glob("*.png")))
    assert "#0102" not in html, "all colors are the page's"
    return _tables(markdown), markdown, html


def test_numbers_are_those_of_the_files(tmp_path: Path) -> None:
    scores = {"one": [0.6, 0.62, 0.61], "two": [0.9, 0.91, 0.92], "three": [0.61, 0.62, 0.6]}
    runs = [with_predictions(tmp_path, f"sizes-{name}", values) for name, values in scores.items()]
    for run, speed, batch in zip(runs, (10.0, 100.0, 20.0), (8, 32, 128), strict=True):
        _trained(run, speed, global_batch_size=batch)
    found, markdown, html = _report(runs, tmp_path / "out", question="Which <size>?", x="phases[0].global_batch_size")
    assert found["differs from one in"][1:] == [
        ["two", "phases[0].global_batch_size 32 (was 8)"],
        ["three", "phases[0].global_batch_size 128 (was 8)"],
    ]
    assert found["unigram"][:2] == [
        ["one", "done", "20", "2,000", "3 min 20 s", "10", "4.990", "6.500"],
        ["two", "done", "20", "2,000", "20.0 s", "100", "4.900", "6.500"],
    ]
    assert found["topics, accuracy"] == [["one", "0.610"], ["two", "0.910 (better)"], ["three", "0.610"]]
    assert markdown.index("## Verdict") < markdown.index("## Results") < markdown.index("](scores.png)")
    [one, two, _] = found["difference to one"]
    assert one == ["one", "0.610 [0.600 to 0.620]", ""]
    assert two[1] == "0.910 [0.900 to 0.920]" and two[2].startswith("30.0 points [2")
    assert "random weights" not in markdown
    for text in (markdown, html):
        assert "All held-out losses are of the same tokens" in text
        assert "Tasks: two wins against one, on 1 task: better on topics by 30.0 points" in text
        assert "Held-out loss: two has the lowest, 4.900 nats, 0.090 below one; with one training seed" in text
        assert "Each score is over 3 seeds of fine-tuning." in text and "Each run was trained with one seed." in text
        assert (
            "better on 1 of 1 (topics by 30.0 points" in text and "no significant difference on 1 of 1 (topics)" in text
        )
        assert "Which &lt;size&gt;?" in text and "2027-01-15" in text
    assert (tmp_path / "out" / "loss-by-key.png").exists()


def test_runs_that_evaluate_only_their_parent_or_random_weights_are_compared(tmp_path: Path) -> None:
    """With a curve of scores, because `x` is a key of the evaluation."""
    runs = []
    for init, number, values in (
        ("parent", 100, [0.6, 0.62, 0.61]),
        ("parent", 1000, [0.9, 0.91, 0.92]),
        ("random", 100, [0.3, 0.32, 0.31]),
    ):
        run = _trained(with_predictions(tmp_path, f"few-{init}-{number}", values, init=init), 10.0)
        content = json.loads((run / "recipe.json").read_text())
        content["eval"] |= {"inits": [init], "max_examples": number}
        (run / "recipe.json").write_text(json.dumps(content))
        runs.append(run)
    found, markdown, _ = _report(runs, tmp_path / "out", x="eval.max_examples", series=["eval.inits"])
    assert found["topics, accuracy"] == [
        ["parent-100 (parent)", "0.610"],
        ["parent-1000 (parent)", "0.910 (better)"],
        ["random-100 (random weights)", "0.310 (worse)"],
    ]
    [_, other, random] = found["difference to parent-100 (parent)"]
    assert other[1:3] == ["0.910 [0.900 to 0.920]", "none"] and other[3].startswith("30.0 points [2")
    assert random[1:3] == ["none", "0.310 [0.300 to 0.320]"] and random[3].startswith("-30.0 points [-3")
    assert "](scores-by-key.png)" in markdown and "The median scores against eval.max_examples." in markdown
    assert "| run | parent | random weights |" in markdown and "Hollow" not in markdown


def test_losses_of_other_tokens_are_not_called_comparable(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2, [(0, 9.0)], [(0, "random", 0.5)]) for name in ("a", "b", "c")]
    for run, unigram in zip(runs, (6.5, 6.5, 6.6), strict=True):
        _trained(run, 10.0, unigram)
    _, markdown, _ = _report(runs, tmp_path / "out")
    assert "comparable only where the same tokens are predicted. Comparable are those of a, b." in markdown
    assert "| run | pretrained | random weights | difference to a |" in markdown and "Hollow: from random" in markdown
    _, markdown, _ = _report(runs[1:], tmp_path / "other")
    assert "None of these are comparable." in markdown


def test_runs_that_have_only_begun_have_a_sound_report(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2, [(0, 9.0)], [(0, "pretrained", 0.5)]) for name in ("a", "b")]
    for path in ("metrics.jsonl", "summary.json", "eval/results.jsonl"):
        (runs[1] / path).unlink()
    found, _, _ = _report(runs, tmp_path / "out")
    assert found["unigram"][1] == ["b", "not started", "0", "0", "", "", "", ""]
    assert found["difference to a"][1] == ["b", "none", ""]
    for path in ("metrics.jsonl", "eval/results.jsonl"):
        (runs[0] / path).unlink()
    found, markdown, _ = _report(runs, tmp_path / "nothing")
    assert "Tasks" not in markdown and len(found) == 2
    with pytest.raises(UserError, match=r"no run has a number as model\.depth"):
        write_comparison(runs, tmp_path / "nothing", "sizes", x="model.depth")


def test_a_run_that_diverged_is_cut_off_and_told(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2, [(0, 9.0)], [(0, "pretrained", 0.5)]) for name in ("one", "two")]
    for run in runs:
        _trained(run, 10.0)
    _, markdown, _ = _report(runs, tmp_path / "out", x="model.layers")
    assert "cut off" not in markdown
    append_row(runs[1] / "metrics.jsonl", {"step": 20, "heldout_mlm_loss": 30.0})
    append_row(runs[1] / "metrics.jsonl", {"step": 21, "heldout_mlm_loss": 30.0})
    _, markdown, _ = _report(runs, tmp_path / "out", x="model.layers")
    assert markdown.count("Losses above 9.9, more than those of a uniform guess, are cut off.") == 3


def test_a_section_that_one_recipe_lacks_is_told_in_a_word(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, 2, [(0, 9.0), (10, 7.0)], [(0, "pretrained", 0.5)]) for name in ("a", "b", "c")]
    c4 = {"citations": True, "min_line_words": 5}
    for run, filters in zip(runs, ({"c4": None}, {"c4": c4}, {"c4": None, "gopher": {}}), strict=True):
        path = run / "recipe.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "data": {"filters": filters}}))
    told = _report(runs, tmp_path / "out")[0]["differs from a in"][1:]
    assert told == [["b", "data.filters.c4 set (was none)"], ["c", "data.filters.gopher {} (was none)"]]
    told = _report([runs[1], runs[0]], tmp_path / "out")[0]["differs from b in"][1:]
    assert told == [["a", "data.filters.c4 none (was set)"]]


def test_names_and_values_are_shown_as_they_are_written(tmp_path: Path) -> None:
    text = "<b>$x_1$</b> | `y`"
    runs = [make_run(tmp_path / name, 2, [(0, 9.0), (10, 7.0)], [(0, "pretrained", 0.5)]) for name in ("_a$b$", "b")]
    for run in runs:
        told = {"schedule": text, "ramp": [{"n": 1}]} if run.name == "b" else {"schedule": "linear", "ramp": []}
        _trained(run, 10.0, **told)
    found, markdown, html = _report(runs, tmp_path / "out", x="model.layers", series=["phases[0].schedule"])
    assert found["differs from _a$b$ in"][1] == [
        "b",
        f"phases[0].schedule {text} (was linear), phases[0].ramp[0].n 1 (was none)",
    ]
    assert "<b>" not in markdown + html


def test_the_clock_goes_on_over_restarts_and_the_first_row_of_a_step_counts(tmp_path: Path) -> None:
    rows = [(10, 1000, 50.0), (20, 2000, 100.0), (15, 1500, 1.0), (20, 2000, 1.0), (30, 3000, 200.0)]
    for step, tokens, speed in rows:
        append_row(tmp_path / "metrics.jsonl", {"step": step, "tokens": tokens, "tokens_per_s": speed})
    clock = training_clock(read_rows(tmp_path / "metrics.jsonl"))
    assert clock == ([0, 10, 15, 20, 30], [0, 1000, 1500, 2000, 3000], [0.0, 20.0, 520.0, 525.0, 530.0])


def _translating(runs: Path, name: str, seed: int, bleu: float, words: Sequence[int] = (5, 15, 15, 45)) -> Path:
    """Make a run with a trial of the task `verses`; each sentence has a BLEU of 100, or of `bleu` if it is long."""
    run = make_run(runs / name, 2, [(0, 9.0)], [(0, "pretrained", 0.5)])
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "seed": seed, "eval": {"tasks": ["verses"], "seeds": [0]}}))
    row = {
        "task": "verses", "kind": "translation", "metric": "BLEU", "higher_is_better": True, "init": "pretrained",
        "seed": 0, "value": bleu, "dev_value": None, "status": "ok", "key": f"key{name.replace('-', '')}",
        "other_metrics": {"chrF": bleu / 2, "BLEU of the source": 0.5}, "signatures": {"BLEU": "nrefs:1|tok:13a"},
        "test_fingerprint": f"of {words}", "checkpoint_step": None,
    }  # fmt: skip
    write_plan_for(run, [row])
    (run / "eval" / "results.jsonl").write_text(json.dumps(row) + "\n")
    table = [[100, 100, *[100 if each <= 40 else bleu] * 4, *[100] * 4] for each in words]
    (run / "eval" / "predictions").mkdir()
    content = {"statistics": table, "source_words": list(words), "predicted": [""] * len(words)}
    (run / "eval" / "predictions" / f"{row['key']}.json").write_text(json.dumps(content))
    return _trained(run, 10.0)


def test_translations_are_told_by_length_and_runs_that_differ_in_their_seed_as_one(tmp_path: Path) -> None:
    scores = {"seed1-deaf": 20.0, "seed2-deaf": 24.0, "seed1-hearing": 60.0, "seed2-hearing": 70.0}
    runs = [_translating(tmp_path, f"sizes-{name}", int(name[4]), bleu) for name, bleu in scores.items()]
    found, markdown, _ = _report(runs, tmp_path / "out")
    assert [line[0] for line in found["unigram"]] == list(scores), "each has its own line of losses"
    assert [line[0] for line in found["differs from deaf in"]] == ["deaf", "hearing"]
    assert found["differs from deaf in"][1][1].endswith("seeds 1, 2")
    assert found["difference to deaf"][1][:2] == ["hearing", "65.0 [60.0 to 70.0]"]
    assert found["BLEU of the source"] == [
        ["deaf", "11.0 [10.0 to 12.0]", "0.500 [0.500 to 0.500]"],
        ["hearing", "32.5 [30.0 to 35.0]", "0.500 [0.500 to 0.500]"],
    ]
    assert found["41+ (1)"] == [
        ["deaf", "100.0 [100.0 to 100.0]", "100.0 [100.0 to 100.0]", "22.0 [20.0 to 24.0]"],
        ["hearing", "100.0 [100.0 to 100.0]", "100.0 [100.0 to 100.0]", "65.0 [60.0 to 70.0]"],
    ]
    assert "(bleu-by-length.png)" in markdown and "Signatures of sacrebleu: nrefs:1" in markdown


def test_runs_that_are_named_by_their_seed_alone_keep_the_name_before_it(tmp_path: Path) -> None:
    names = ("sizes-seed1", "sizes-seed2", "sizes-deaf-seed1", "sizes-deaf-seed2")
    runs = [_translating(tmp_path, name, int(name[-1]), 20.0) for name in names]
    found, _, _ = _report(runs, tmp_path / "out")
    assert [line[0] for line in found["differs from sizes in"]] == ["sizes", "sizes-deaf"]


def test_losses_of_several_training_seeds_are_judged(tmp_path: Path) -> None:
    speeds = {"a": (10.0, 20.0, 30.0), "b": (2010.0, 2020.0, 2040.0)}
    runs = []
    for name, each in speeds.items():
        for seed, speed in enumerate(each, start=1):
            run = _translating(tmp_path, f"sizes-seed{seed}-{name}", seed, 20.0)
            append_row(run / "metrics.jsonl", {"step": 21, "heldout_mlm_loss": 5.0 - speed / 1000})
            runs.append(run)
    _, markdown, _ = _report(runs, tmp_path / "out")
    assert "Held-out loss: b has the lowest, 2.977 nats, 2.003 \\[" in markdown
    assert "below a: significant, p &lt; 0.001, over 3 + 3 training seeds." in markdown
    assert "A run was trained with 3 seeds." in markdown


def test_runs_that_were_tested_on_other_sentences_are_not_in_the_picture_by_length(tmp_path: Path) -> None:
    runs = [_translating(tmp_path, "one", 1, 20.0), _translating(tmp_path, "two", 1, 30.0, words=(5, 6))]
    found, _, _ = _report(runs, tmp_path / "out")
    assert [line[0] for line in found["41+ (1)"]] == ["one"]
    (runs[0] / "eval" / "predictions" / "keyone.json").unlink()
    assert [line[0] for line in _report(runs, tmp_path / "out")[0]["1-10 (2)"]] == ["two"]


def _fine_tuned(runs: Path, name: str, seed: int, values: list[float]) -> Path:
    """Make a run pretrained with `seed`, with a trial and its predictions for each of `values`."""
    run = with_predictions(runs, f"sizes-seed{seed}-{name}", values, checkpoint_sha256=f"{name}{seed}")
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "seed": seed}))
    for path in (run / "eval" / "results.jsonl", run / "eval" / "plan.json"):
        path.write_text(
            path.read_text().replace('"pretrained0"', f'"{name}{seed}0"').replace('"pretrained1"', f'"{name}{seed}1"')
        )
    for trial in (0, 1):
        (run / "eval/predictions" / f"pretrained{trial}.json").rename(
            run / "eval/predictions" / f"{name}{seed}{trial}.json"
        )
    return run


def test_fine_tuned_models_are_judged_by_the_mean_of_each_training_seed(tmp_path: Path) -> None:
    scores = {"one": ([0.5, 0.7], [0.6, 0.62], [0.59, 0.6]), "two": ([0.9, 0.8], [0.85, 0.87], [0.84, 0.84])}
    runs = [
        _fine_tuned(tmp_path, name, seed, values)
        for name, of_name in scores.items()
        for seed, values in enumerate(of_name, start=1)
    ]
    found, markdown, _ = _report(runs, tmp_path / "out")
    assert found["difference to one"] == [
        ["one", "0.600 [0.500 to 0.700]", ""],
        ["two", "0.845 [0.800 to 0.900]", "24.8 points [17.4 to 32.3]"],
    ]
    assert "The score of a training seed is over 2 seeds of fine-tuning." in markdown
    assert "A run was trained with 3 seeds." in markdown


def test_runs_with_the_same_training_seed_stay_apart(tmp_path: Path) -> None:
    runs = [with_predictions(tmp_path, f"seed1-{name}", [0.6, 0.7]) for name in ("one", "two")]
    runs.append(with_predictions(tmp_path, "one", [0.6, 0.7]))
    found, _, _ = _report(runs, tmp_path / "out")
    assert [line[0] for line in found["difference to seed1-one"]] == ["seed1-one", "seed1-two", "one"]


def test_runs_that_differ_in_more_than_their_seed_or_their_test_set_stay_apart(tmp_path: Path) -> None:
    runs = [_translating(tmp_path, f"sizes-seed{seed}-one", seed, 20.0) for seed in (1, 2, 3, 4)]
    other = json.loads((runs[1] / "recipe.json").read_text())
    other["phases"][0]["lr"] = 0.5
    (runs[1] / "recipe.json").write_text(json.dumps(other))
    row = json.loads((runs[2] / "eval" / "results.jsonl").read_text())
    (runs[2] / "eval" / "results.jsonl").write_text(json.dumps({**row, "test_fingerprint": "another"}) + "\n")
    found, _, _ = _report(runs, tmp_path / "out")
    assert [line[0] for line in found["differs from one in"]] == ["one", "seed2-one", "seed3-one"]
    assert found["differs from one in"][0][1].endswith("seeds 1, 4")


def test_settings_of_other_objectives_are_not_shown(tmp_path: Path) -> None:
    objectives = {
        "lstm": {"name": "translation", "mask_rate": 0.15, "label_smoothing": 0.0},
        "ctc": {"name": "ctc", "mask_rate": 0.15, "label_smoothing": 0.1},
        "other": {"name": "of another version", "mask_rate": 0.2, "label_smoothing": 0.1},
    }
    runs = [with_predictions(tmp_path, name, [0.6, 0.7]) for name in objectives]
    for run, objective in zip(runs, objectives.values(), strict=True):
        content = json.loads((run / "recipe.json").read_text())
        (run / "recipe.json").write_text(json.dumps({**content, "objective": objective}))
    found, _, _ = _report(runs, tmp_path / "out")
    assert found["differs from lstm in"][1:] == [
        ["ctc", "objective.name ctc (was translation), objective.label_smoothing none (was 0.0)"],
        [
            "other",
            "objective.name of another version (was translation), objective.label_smoothing 0.1 (was 0.0), "
            "objective.mask_rate 0.2 (was none)",
        ],
    ]


def test_runs_of_the_same_name_are_shown_by_their_paths(tmp_path: Path) -> None:
    runs = [with_predictions(tmp_path / folder, "one", [value, value]) for folder, value in (("a", 0.6), ("b", 0.9))]
    assert [run.name for run in read_runs(runs)] == [str(run) for run in runs]
    markdown = _report(runs, tmp_path / "out")[1]
    assert "better on 1 of 1 (topics by 30.0 points" in markdown


def test_notes_say_that_scores_are_older_than_recipe_or_checkpoint(tmp_path: Path) -> None:
    runs = [with_predictions(tmp_path, name, [0.6, 0.7]) for name in ("new", "changed", "older", "early")]
    recipe = json.loads((runs[1] / "recipe.json").read_text())
    recipe["eval"] |= {"seeds": [0, 1], "cpus": 4}
    (runs[1] / "recipe.json").write_text(json.dumps(recipe))
    (runs[2] / "eval" / "plan.json").unlink()
    rows = read_rows(runs[3] / "eval" / "results.jsonl")
    content = "".join(json.dumps({**row, "checkpoint_step": 10}) + "\n" for row in rows)
    (runs[3] / "eval" / "results.jsonl").write_text(content)
    (runs[3] / "summary.json").write_text(json.dumps({"steps": 20}))
    found, markdown, html = _report(runs, tmp_path / "out")
    assert [line[1] for line in found["difference to new"]][2] == "none", "an older version's rows are not shown"
    notes = [run.notes for run in read_runs(runs)]
    assert notes[0] == () and [len(each) for each in notes[1:]] == [1, 1, 1]
    assert "its recipe changed (eval.seeds was [0, 1, 2], is [0, 1])" in notes[1][0]
    assert (
        "The results of older were written by an older version" in notes[2][0]
        and "run `multihop eval` again" in notes[2][0]
    )
    assert "its checkpoint at step 10, but it is trained to step 20" in notes[3][0]
    assert all("is trained to step 20" in text for text in (markdown, html))
