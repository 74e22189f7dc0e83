"""`multihop recipes`: the recipes of the package can be listed, copied and run from the copy."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from multihop.cluster.cli.main import app
from multihop.cluster.runs.experiment import read_experiment
from multihop.cluster.runs.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
NAMES = sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def test_all_are_listed_with_what_they_are() -> None:
    listed = [line.split() for line in CliRunner().invoke(app, ["recipes"]).stdout.splitlines() if line[0] != " "]
    assert sorted(name for name, *_ in listed) == NAMES and all(len(words) > 3 for words in listed)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_recipe_and_finds_what_it_refers_to(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["recipes", "copy", name, "--out", str(tmp_path)])
    copy = tmp_path / f"{name}.yaml"
    assert done.exit_code == 0 and copy.read_bytes() == (RECIPES / f"{name}.yaml").read_bytes()
    if name.startswith("experiments/"):
        assert read_experiment(copy, []).variants
    else:
        assert load_recipe(copy, []) == load_recipe(RECIPES / f"{name}.yaml", [])


def test_nothing_is_overwritten_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reviews.yaml").write_text("mine")
    done = CliRunner().invoke(app, ["recipes", "copy", "experiments/phases", "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError) and "reviews.yaml exists" in str(done.exception)
    assert [path.name for path in tmp_path.rglob("*")] == ["reviews.yaml"]
    unknown = CliRunner().invoke(app, ["recipes", "copy", "bert-bas"])
    assert "bert-bas is not the name of a recipe; known names: albert-base, " in str(unknown.exception)
