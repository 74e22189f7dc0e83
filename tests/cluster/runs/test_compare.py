"""The comparison of two made-up runs."""

import json
import shutil
from pathlib import Path

import pytest
from made_up_runs import make_run, with_predictions

from multihop.cluster.runs.compare import compare, find_runs, show_comparison
from multihop.common.errors import UserError


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
    assert comparison.results["topics accuracy, random"] == ["0.600 [0.500 to 0.700]", ""]
    assert comparison.results["topics accuracy, pretrained"] == ["", "0.900"]
    assert comparison.heldout == [{0: 9.0, 10: 7.0}, {0: 9.0, 10: 6.5}]


def test_a_run_that_has_only_begun(runs: Path) -> None:
    (runs / "new").mkdir()
    (runs / "new" / "recipe.json").write_text((runs / "one" / "recipe.json").read_text())
    comparison = compare([runs / "one", runs / "new"])
    assert comparison.recipe == {}
    assert comparison.results["heldout_loss"] == ["7.0000", ""]
    assert comparison.heldout[1] == {}


def test_differences_in_words_each_against_the_first(tmp_path: Path) -> None:
    runs = [
        with_predictions(tmp_path, name, values)
        for name, values in (("a", [0.6, 0.62, 0.61]), ("b", [0.9, 0.91, 0.92]), ("c", [0.61, 0.62, 0.6]))
    ]
    better, same = compare(runs).differences
    assert better.startswith("b against a: b is better on topics by 30.0 points [2")
    assert same.startswith("c against a: no significant difference on topics (0.0 points [-")
    assert compare([runs[1], runs[0]]).differences[0].startswith("a against b: b is better on topics by 30.0 points [2")


def test_what_cannot_be_judged_says_why(tmp_path: Path) -> None:
    run = with_predictions(tmp_path, "a", [0.6, 0.62, 0.61])
    one_seed = with_predictions(tmp_path, "b", [0.9])
    [difference] = compare([run, one_seed]).differences
    assert difference.startswith("b against a: topics is not judged (difference 29.0 points [")
    assert difference.endswith("at least two seeds on each side are needed")
    others = {
        "c": ({"metric": "F1"}, "the metrics are accuracy and F1"),
        "d": ({"test_fingerprint": "u"}, "the runs have different test sets"),
    }
    for name, (change, why) in others.items():
        other = with_predictions(tmp_path, name, [0.9, 0.91], **change)
        assert compare([run, other]).differences == [f"{name} against a: topics is not judged: {why}"]
    perplexity = {"kind": "zero-shot", "metric": "perplexity", "higher_is_better": False}
    counted = [
        with_predictions(tmp_path, name, [0.5], **perplexity, other_metrics={"tokens": tokens})
        for name, tokens in (("e", 100), ("f", 120))
    ]
    assert "different tokens" in compare(counted).differences[0]
    words = [
        with_predictions(tmp_path, name, [0.5], **perplexity, other_metrics={"words": 50, "tokens": tokens})
        for name, tokens in (("g", 100), ("h", 120))
    ]
    assert "different tokens" not in compare(words).differences[0], "words are the same whatever the tokenizer"
    pseudo = {"words": 50, "pseudo-bits per byte": 1.0}
    masked = with_predictions(tmp_path, "i", [0.5], **perplexity, other_metrics=pseudo)
    assert "one is the pseudo-perplexity of a masked model" in compare([words[0], masked]).differences[0]


def test_the_table_and_the_picture(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    show_comparison(["one", str(runs / "two")], runs)
    printed = capsys.readouterr().out
    assert "phases[1].lr" in printed
    assert "0.600 [0.500 to 0.700]" in printed and "Holm" not in printed, "no task has been run by both"
    assert (tmp_path / "compare-one-two.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_of_one_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [with_predictions(tmp_path / name, "one", [0.6, 0.62]) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    show_comparison([str(folder) for folder in folders], tmp_path)
    printed = capsys.readouterr().out
    assert all(str(folder) in printed for folder in folders) and len([*tmp_path.glob("compare-*.png")]) == 1


def test_the_picture_of_many_runs_has_a_name_that_file_systems_take(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """recipes/experiments/large-batches.yaml has 16 runs with such names."""
    monkeypatch.chdir(tmp_path)
    names = [f"large-batches-lamb-linear-b{number:04d}" for number in range(16)]
    for name in names:
        shutil.copytree(runs / "one", runs / name)
    show_comparison(names, runs)
    assert [path.name for path in tmp_path.glob("*.png")] == [f"compare-{names[0]}-and-15-others.png"]


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


def test_a_run_that_does_not_exist(runs: Path) -> None:
    with pytest.raises(UserError, match=r"no run three in .*; existing runs: one, two"):
        find_runs(["one", "three"], runs)
    with pytest.raises(UserError, match="at least two runs"):
        find_runs(["one"], runs)
