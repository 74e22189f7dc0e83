"""Recipes: read, overridden, validated, resolved."""

from pathlib import Path

import pytest

from cluster.recipe import Recipe, load_recipe
from pretrain.changes import differences, flatten

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_project_is_valid_and_resolves_to_itself(path: Path) -> None:
    recipe = load_recipe(path, [])
    assert recipe.name == path.stem
    assert isinstance(recipe.engine.deepspeed, dict)
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_overrides_reach_everything_and_are_typed_as_yaml() -> None:
    given = ["phases[0].steps=7", "model.layers=3", "eval.seeds=[4, 5]", "tracking.uri=null", "name=other"]
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml", given)
    assert recipe.phases[0].steps == 7 and recipe.model.layers == 3
    assert recipe.eval.seeds == [4, 5] and recipe.tracking.uri is None and recipe.name == "other"
    before = load_recipe(ROOT / "recipes" / "demo.yaml", [])
    changed = {key for key, _, _ in differences(before.model_dump(mode="json"), recipe.model_dump(mode="json"))}
    assert changed == {"phases[0].steps", "model.layers", "eval.seeds", "name"}


def test_a_field_beside_a_preset_wins_and_what_follows_from_it_follows() -> None:
    recipe = load_recipe(ROOT / "recipes" / "demo.yaml", ["model={preset: bert-mini, hidden: 64}"])
    assert (recipe.model.layers, recipe.model.hidden, recipe.model.intermediate) == (4, 64, 256)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("model.layer=3", "model.layer is not a key of a recipe; known here: dropout, embedding, family"),
        (
            "data.sources=[{pth: x}]",
            r"data.sources\[0\].pth is not a key of a recipe; known here: documents, field",
        ),
        ("seed=-1", "seed=-1: input should be greater than or equal to 0"),
        ("seed=one", 'seed="one": input should be a valid integer'),
        ("model.preset=bert-huge", "not known; there are: bert-tiny"),
        ("name=../up", "cannot be a folder's name"),
        ("checkpoint.location=s3://", "give a folder or s3://BUCKET/PREFIX"),
        ("checkpoint.location=s3:/bucket/x", "give a folder or s3://BUCKET/PREFIX"),
        ("checkpoint.location=gs://bucket", "give a folder or s3://BUCKET/PREFIX"),
        ("phases[5].steps=1", "cannot be applied"),
        ("phases[0].seq_len=1024", "shorten the one or raise the other"),
        ("objective.name=clm", "does not train model.family=bert"),
        ("tokenizer.special_pieces=gpt2", "set tokenizer.special_pieces=bert"),
        ("engine.deepspeed=none.json", "there is no such file"),
        ("engine.deepspeed={zero_optimization: {stage: 2}}", "contradicts the recipe, which says 1"),
        ("engine={precision: bf16, zero_stage: 0}", "use stage 1, 2 or 3"),
        ("steps", "is not an override; write KEY.PATH=VALUE"),
        ("data.sources=null", "data.sources=null: input should be a valid list"),
        ("model=5", "model=5"),
    ],
)
def test_mistakes_are_told_with_the_key_and_the_way_out(override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_recipe(ROOT / "recipes" / "demo.yaml", [override])


@pytest.mark.parametrize(
    ("content", "complaint"), [("{", "not valid YAML"), ("- 1", "expected the sections"), ("", "is missing; set it")]
)
def test_files_that_are_no_recipe_are_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "r.yaml").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        load_recipe(tmp_path / "r.yaml", [])
    with pytest.raises(ValueError, match="there is no recipe"):
        load_recipe(tmp_path / "none.yaml", [])


def test_flattening_names_every_leaf() -> None:
    tree = {"a": 1, "b": {"c": [2, {"d": None}]}, "e": {}, "f": []}
    assert flatten(tree) == {"a": 1, "b.c[0]": 2, "b.c[1].d": None, "e": {}, "f": []}
