"""Experiments: the content of their files, the published ones, and a small one from its runs to its report."""

import json
from pathlib import Path

import pytest
import yaml
from workplace import begin, ended, make_workplace, multihop

from multihop.cluster.runs.experiment import read_experiment
from multihop.cluster.runs.recipe import load_recipe
from multihop.common.errors import UserError
from multihop.common.json_lines import read_rows
from multihop.eval.report.run_metrics import training_clock
from multihop.pretrain.data.phases import samples_before, total_steps

ROOT = Path(__file__).parents[3]
PUBLISHED = sorted((ROOT / "recipes" / "experiments").glob("*.yaml"))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of an experiment's file next to the recipe of a tiny GPT-2."""
    make_workplace(tmp_path, tmp_path / "texts", "base", 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sizes.yaml"


def write(file: Path, **content: object) -> Path:
    given = {"question": "Which size?", "recipe": "recipe.yaml", "runs": {"one": {}, "two": {"model.layers": 3}}}
    file.write_text(yaml.safe_dump(given | content, sort_keys=False))
    return file


def test_each_run_is_the_recipe_with_its_changes_and_those_of_all(file: Path) -> None:
    write(file, set={"phases[0].lr": 0.5, "model.layers": 1})
    plan = read_experiment(file, ["phases[0].steps=7"])
    one, two = (variant.recipe() for variant in plan.variants)
    assert [one.name, two.name] == ["sizes-one", "sizes-two"]
    assert [one.model.layers, two.model.layers] == [1, 3]
    assert {recipe.phases[0].lr for recipe in (one, two)} == {0.5}
    assert {recipe.phases[0].steps for recipe in (one, two)} == {7}, "the command line has the last word"
    assert two == load_recipe(
        Path("recipe.yaml"), ["phases[0].lr=0.5", "model.layers=3", "phases[0].steps=7", "name=sizes-two"]
    )
    assert plan.repeated == []
    assert [variant.name for variant in read_experiment(file, ["name=other"]).variants] == ["other-one", "other-two"]


def test_a_list_of_mappings_is_a_grid(file: Path) -> None:
    batches = {f"b{size}": {"phases[0].global_batch_size": size} for size in (4, 8, 16)}
    write(file, runs=[{"one": {}, "two": {"model.layers": 3}}, batches], same_seconds={"phases[0].lr": 0.25})
    plan = read_experiment(file, [])
    result = {each.name: each.recipe() for each in plan.variants}
    assert list(result) == [f"sizes-{size}-{batch}" for size in ("one", "two") for batch in ("b4", "b8", "b16")]
    assert result["sizes-two-b16"].model.layers == 3 and result["sizes-two-b16"].phases[0].global_batch_size == 16
    assert result["sizes-two-b4"].phases[0].global_batch_size == 4, "runs share no values"
    assert [each.name for each in plan.repeated] == [f"{name}-same-seconds" for name in list(result)[1:]]
    assert {each.recipe().phases[0].lr for each in plan.repeated} == {0.25}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"run": {}}, "run is not a key of an experiment; known keys: name, question, recipe, runs"),
        ({"runs": []}, "runs="),
        ({"recipe": "none.yaml"}, "none.yaml"),
        ({"set": {"model.layer": 3}}, r"sizes\.yaml: the run sizes-one: .*model.layer is not a key of a recipe"),
        ({"set": {"a b": 3}}, "'a b' is not an override"),
        ({"set": {"name": "x"}}, "set: the key name cannot be set"),
        ({"runs": {"one": {"name": "x"}}}, "runs: the key name cannot be set"),
        ({"runs": {"a/b": {}}}, "'sizes-a/b' is not a valid name"),
        ({"runs": [{"a": {}, "a-b": {}}, {"b-c": {}, "c": {}}]}, "two runs are called sizes-a-b-c"),
        ({"x": "phases[0].batchsize"}, "phases\\[0\\].batchsize is not a key of a recipe"),
        ({"series": ["optimiser"]}, "optimiser is not a key of a recipe"),
    ],
)
def test_mistakes_get_a_sentence(file: Path, content: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_experiment(write(file, **content), [])


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_published_experiment_is_valid_and_its_trained_runs_have_the_same_tokens(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    plan = read_experiment(path, ["data.sources[0].path=/data/imdb", "eval.data_dir=/data/tasks"])
    # A run that evaluates only the checkpoint it began from is not compared by what it learned.
    trained = [recipe for recipe in (variant.recipe() for variant in plan.variants) if recipe.eval.inits != ["parent"]]
    if not trained:
        assert {phase.steps for variant in plan.variants for phase in variant.recipe().phases} == {1}
        return
    # Neither is one of random weights alone, beside runs that learn.
    learning = [recipe for recipe in trained if recipe.eval.inits != ["random"]] or trained
    tokens = set()
    for recipe in learning:
        phases, before, total = recipe.phases, 0, 0
        for number, phase in enumerate(phases):
            until = total_steps(phases[: number + 1])
            total += (samples_before(phases, until) - samples_before(phases, before)) * phase.seq_len
            before = until
        tokens.add(total)
    assert len(tokens) == 1 and len(trained) > 1
    assert {variant.recipe().data.sources[0].path for variant in plan.variants} == {"/data/imdb"}


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_all_runs_are_done_once_on_data_prepared_once_and_reported(tmp_path: Path, texts: Path) -> None:
    make_workplace(tmp_path, texts, "base", 20)
    runs = {"one": {"model.layers": 8}, "bad": {"tokenizer.vocab_size": 50_000}, "two": {"model.layers": 1}}
    write(
        tmp_path / "sizes.yaml",
        set={"cluster.workers": 1, "engine.eval_interval": 10},
        runs=runs,
        same_seconds={},
        x="model.layers",
    )
    (tmp_path / "runs" / "sizes-two").mkdir(parents=True)
    other = load_recipe(tmp_path / "recipe.yaml", ["name=sizes-two", "model.layers=4"])
    (tmp_path / "runs" / "sizes-two" / "recipe.json").write_text(json.dumps(other.model_dump(mode="json")))
    refused = multihop(tmp_path, "experiment", "sizes.yaml", code=2)
    assert "runs/sizes-two was started with another recipe" in refused and "run 1/" not in refused
    (tmp_path / "runs" / "sizes-two" / "recipe.json").unlink()

    command = begin(tmp_path, "experiment", "sizes.yaml")
    command.wait(timeout=800)
    output = ended(tmp_path, command, code=1)
    assert "failed    sizes-bad: " in output and "more than the text can support" in output
    assert "failed    sizes-bad-same-seconds: sizes-bad is not trained to its end" in output
    done = [path.parent.name for path in sorted((tmp_path / "runs").glob("*/summary.json"))]
    assert done == ["sizes-one", "sizes-two", "sizes-two-same-seconds"]
    assert len(list((tmp_path / "runs" / ".prepared").glob("*/*/manifest.json"))) == 1, "the prepared data is shared"
    again = json.loads((tmp_path / "runs" / "sizes-two-same-seconds" / "recipe.json").read_text())
    one, two = (
        training_clock(read_rows(tmp_path / "runs" / f"sizes-{name}" / "metrics.jsonl"))
        for name in runs
        if name != "bad"
    )
    assert again["phases"][0]["steps"] == max(1, round(20 * one[2][-1] / two[2][-1]))
    report = (tmp_path / "runs" / "sizes" / "report.md").read_text()
    assert report.startswith("# sizes\n\nWhich size?\n") and all(
        f"| {name.removeprefix('sizes-')} | done |" in report for name in done
    )
    assert "All held-out losses are of the same tokens" in report and "(loss-by-key.png)" in report

    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sizes-*/*.jsonl")}
    output = multihop(tmp_path, "experiment", "sizes.yaml", code=1)
    assert output.count("nothing left to do") == 3
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("sizes-*/*.jsonl")}

    multihop(tmp_path, "report", "sizes-one", "sizes-two", "--out", "both", "--x", "model.layers")
    assert (tmp_path / "both" / "report.md").read_text().startswith("# sizes-one and sizes-two\n")
    assert (tmp_path / "both" / "loss-by-key.png").exists()
