"""What a run finds in its folder, and where its checkpoints go."""

import json
from pathlib import Path

import pytest

from pretrain.run_files import claim_checkpoints, read_config


def run_dir(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_a_place_of_checkpoints_belongs_to_one_run(place: str, tmp_path: Path) -> None:
    one, other = (run_dir(tmp_path, name) for name in ("one", "other"))
    for _ in range(2):
        claim_checkpoints(one, f"{place}/shared")
    with pytest.raises(ValueError, match="holds the checkpoints of another run"):
        claim_checkpoints(other, f"{place}/shared")
    claim_checkpoints(other, f"{place}/another")


def test_a_place_that_cannot_be_written_to_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written to"):
        claim_checkpoints(run_dir(tmp_path, "run"), str(tmp_path / "file"))


def test_a_recipe_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe.json is missing"):
        read_config(tmp_path)
    (tmp_path / "recipe.json").write_text(
        json.dumps({"model": {"preset": "bert-tiny"}, "phases": [{"steps": 3}], "engine": {"micro_batch": 0}})
    )
    with pytest.raises(ValueError, match=r"engine: .*micro_batch=0 is not a number of samples") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value) and "pydantic" not in str(error.value)


@pytest.mark.parametrize(("then", "now"), [(False, "none"), (True, "keep-inputs")])
def test_a_recipe_of_an_older_version_is_read(tmp_path: Path, then: bool, now: str) -> None:
    recipe = {
        "model": {"family": "bert", "layers": 1, "hidden": 8, "heads": 1, "intermediate": 32, "max_positions": 128},
        "objective": {"name": "mlm+nsp", "mask_rate": 0.15},
        "phases": [{"steps": 2}],
        "engine": {"activation_checkpointing": then},
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    config = read_config(tmp_path)
    assert config.engine.activation_checkpointing == now
    assert config.model.embedding == 8
