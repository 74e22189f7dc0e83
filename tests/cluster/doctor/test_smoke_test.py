"""A step, a save and a load of a recipe, which leave no files behind."""

from pathlib import Path

import pytest
from workplace import make_workplace

from multihop.cluster.doctor.smoke_test import smoke_test
from multihop.cluster.runs.recipe import load_recipe
from multihop.cluster.runs.stages import run_stages

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(900)]


def test_two_steps_with_a_checkpoint_between_them(texts: Path, tmp_path: Path) -> None:
    make_workplace(tmp_path, texts, "rehearsed", 500)
    location = f"checkpoint.location={tmp_path / 'checkpoints'}"
    recipe, runs = load_recipe(tmp_path / "recipe.yaml", [location]), tmp_path / "runs"
    assert "not prepared" in smoke_test(recipe, runs)["skipped"]
    run_stages(recipe, runs, ("prep",))
    before = sorted(path.name for path in runs.iterdir())

    result = smoke_test(recipe, runs)
    assert result.keys() == {"first_s", "second_s"}, result
    failed = smoke_test(load_recipe(tmp_path / "recipe.yaml", [location, "cluster.env=[NO_SUCH_VARIABLE]"]), runs)
    assert "has no NO_SUCH_VARIABLE" in failed["error"]
    assert sorted(path.name for path in runs.iterdir()) == before
    assert list((tmp_path / "checkpoints").iterdir()) == []
