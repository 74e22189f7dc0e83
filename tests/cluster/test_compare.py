"""Two made-up runs side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.compare import compare, find_runs, show_comparison


def make_run(folder: Path, layers: int, heldout: list[tuple[int, float]], trials: list[tuple[int, str, float]]) -> Path:
    (folder / "eval").mkdir(parents=True)
    recipe: dict[str, Any] = {
        "name": folder.name,
        "seed": 1,
        "model": {"layers": layers},
        "phases": [{"lr": 1e-3}],
        "eval": {"tasks": ["topics"], "seeds": [0, 1, 2]},
    }
    if layers == 3:
        recipe["phases"].append({"lr": 2e-3})
    (folder / "recipe.json").write_text(json.dumps(recipe))
    rows = [{"step": step, "heldout_loss": loss} for step, loss in heldout] + [{"step": 5, "loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"status": "done", "heldout_loss": heldout[-1][1], "tokens": 1234567, "tokens_per_s": 10000.4}
    (folder / "summary.json").write_text(json.dumps(summary))
    results = [
        {"task": "topics", "metric": "accuracy", "init": init, "seed": seed, "value": value, "status": "ok"}
        for seed, init, value in trials
    ]
    results.append({**results[0], "seed": 2, "init": "other", "value": None, "status": "failed"})
    results.insert(0, {**results[0], "value": 0.0})  # of hyper-parameters that are no longer the recipe's
    (folder / "eval" / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make_run(tmp_path / "one", 2, [(0, 9.0), (10, 7.0)], [(0, "random", 0.5), (1, "random", 0.7), (2, "random", 0.6)])
    make_run(tmp_path / "two", 3, [(0, 9.0), (10, 6.5), (10, 6.9)], [(0, "pretrained", 0.9)])
    return tmp_path


def test_what_differs(runs: Path) -> None:
    comparison = compare([runs / "one", runs / "two"])
    assert comparison.names == ["one", "two"]
    assert comparison.recipe == {"model.layers": ["2", "3"], "phases[1].lr": ["", "0.002"]}
    assert comparison.results["heldout_loss"] == ["7.0000", "6.9000"]
    assert comparison.results["tokens"] == ["1,234,567", "1,234,567"]
    assert comparison.results["topics accuracy, random"] == ["0.6 [0.5 to 0.7]", ""]
    assert comparison.results["topics accuracy, pretrained"] == ["", "0.9 [0.9 to 0.9]"]
    assert comparison.heldout == [{0: 9.0, 10: 7.0}, {0: 9.0, 10: 6.5}]


def test_a_run_that_has_only_begun(runs: Path) -> None:
    (runs / "new").mkdir()
    (runs / "new" / "recipe.json").write_text((runs / "one" / "recipe.json").read_text())
    comparison = compare([runs / "one", runs / "new"])
    assert comparison.recipe == {}
    assert comparison.results["heldout_loss"] == ["7.0000", ""]
    assert comparison.heldout[1] == {}


def test_the_table_and_the_picture(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    show_comparison(["one", str(runs / "two")], runs)
    printed = capsys.readouterr().out
    assert "phases[1].lr" in printed
    assert "0.6 [0.5 to 0.7]" in printed
    assert (tmp_path / "compare-one-two.png").read_bytes().startswith(b"\x89PNG")


def test_what_files_hold_is_no_markup_and_steers_no_terminal(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "[red]x[/blue] [link=http://evil]y[/link] \x1b[31m"
    (runs / "one").rename(runs / "[bold]one")
    for name in ("[bold]one", "two"):
        for file in ("summary.json", "recipe.json"):
            path = runs / name / file
            path.write_text(
                json.dumps({**json.loads(path.read_text()), "status": text, f"{text}{name}": f"{text}{name}"})
            )
    monkeypatch.setenv("COLUMNS", "400")
    show_comparison(["[bold]one", "two"], runs)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "[bold]one" in printed
    assert printed.count(text.replace("\x1b", r"\x1b")) == 4 and printed.count(text.replace("\x1b", r"\u001b")) == 2


def test_a_run_that_is_not_there(runs: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no run three in .*; runs there: one, two"):
        find_runs(["one", "three"], runs)
    with pytest.raises(ValueError, match="two runs or more"):
        find_runs(["one"], runs)
