"""What the stages of a run refuse before they start."""

from pathlib import Path

import pytest

from cluster.runs.recipe import Recipe
from cluster.runs.stages import run_stages


def test_features_that_the_model_lacks_are_refused_before_anything_starts(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "frozen",
            "data": {"sources": [{"path": "texts/"}]},
            "model": {"preset": "bert-tiny"},
            "phases": [{"steps": 10}],
            "eval": {"features": {"layers": [3]}},
        }
    )
    with pytest.raises(ValueError, match="the model has 2 layers and no hidden state 3"):
        run_stages(recipe, tmp_path)
    assert not list(tmp_path.iterdir())
