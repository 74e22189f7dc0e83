"""Recipes are read, overridden, validated and resolved."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from multihop.cluster.runs.folder import locked_run_dir
from multihop.cluster.runs.recipe import Recipe, load_recipe
from multihop.common.errors import UserError
from multihop.pretrain.run.changes import differences, flatten

ROOT = Path(__file__).parents[3]
_AWD_LSTM = ("alpha", "beta", "bptt", "embedding_dropout", "hidden_dropout", "input_dropout", "weight_dropout")
RECIPE_WITH = {
    **{f"model.{key}": "ulmfit-general" for key in _AWD_LSTM},
    "model.cell_clip": "elmo-mini",
    "model.projection_clip": "elmo-mini",
}
"""Recipes of families with keys that the demo's BERT does not have."""


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
    recipe = load_recipe(ROOT / "recipes" / "demo-bert.yaml", given)
    assert recipe.phases[0].steps == 7 and recipe.model.layers == 3
    assert recipe.eval.seeds == [4, 5] and recipe.tracking.uri is None and recipe.name == "other"
    before = load_recipe(ROOT / "recipes" / "demo-bert.yaml", [])
    changed = {key for key, _, _ in differences(before.model_dump(mode="json"), recipe.model_dump(mode="json"))}
    assert changed == {"phases[0].steps", "model.layers", "eval.seeds", "name"}


def test_a_field_beside_a_preset_wins_and_what_follows_from_it_follows() -> None:
    recipe = load_recipe(ROOT / "recipes" / "demo-bert.yaml", ["model={preset: bert-mini, hidden: 64}"])
    assert (recipe.model.layers, recipe.model.hidden, recipe.model.intermediate) == (4, 64, 256)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("model.layer=3", "model.layer is not a key of a recipe; known keys: attention_init, dropout, family, heads"),
        (
            "data.sources=[{pth: x}]",
            r"data.sources\[0\].pth is not a key of a recipe; known keys: documents, field",
        ),
        ("cluster.workers=0", r"cluster.workers\[0\]=0: input should be greater than or equal to 1"),
        ("cluster.workers=[1, 2, 3]", r"cluster.workers=\[1, 2, 3\]: list should have at most 2 items"),
        ("cluster.workers=[4, 2]", r"expected \[min, max\]; write \[2, 4\]"),
        ("seed=-1", "seed=-1: input should be greater than or equal to 0"),
        ("seed=true", "seed=true is not a number; write a number"),
        ("phases[0].lr=false", "lr=false is not a number; write a number"),
        ("model.hidden=abc", 'model.hidden="abc": input should be a valid integer'),
        ("seed=one", 'seed="one": input should be a valid integer'),
        ("model.preset=bert-huge", "unknown preset 'bert-huge'; known are albert-base, "),
        ("name=../up", "is not a valid name"),
        ("name=2024", """input should be a valid string; write it in quotes, on the command line as name='"2024"'"""),
        ("checkpoint.location=s3://", "give a directory or s3://BUCKET/PREFIX"),
        ("checkpoint.location=s3:/bucket/x", "give a directory or s3://BUCKET/PREFIX"),
        ("checkpoint.location=gs://bucket", "give a directory or s3://BUCKET/PREFIX"),
        ("phases[5].steps=1", "cannot be applied"),
        ("phases[0].seq_len=1024", "shorten the one or raise the other"),
        ("objective.name=clm", "does not train model.family=bert"),
        ("tokenizer.special_tokens=gpt2", "set tokenizer.special_tokens=bert"),
        ("engine.deepspeed=none.json", "none.json does not exist"),
        ("engine.deepspeed={zero_optimization: {stage: 2}}", "contradicts the recipe, which says 1"),
        ("engine={precision: bf16, zero_stage: 0}", "set zero_stage to 1, 2 or 3"),
        ("steps", "is not an override; write KEY.PATH=VALUE"),
        ("data.sources=null", "data.sources=null: input should be a valid list"),
        ("model=5", "model=5"),
    ],
)
def test_mistakes_are_reported_with_the_key_and_the_way_out(override: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_recipe(ROOT / "recipes" / "demo-bert.yaml", [override])


MINIMAL = (
    "model: {preset: bert-tiny}\nphases: [{steps: 1}]\nengine: {deepspeed: {}}\ndata: {sources: [{path: x.txt}]}\n"
)
BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid YAML"),
        ("- 1", "expected the sections"),
        ("", "is missing; set it"),
        (BOMB, "line 1 has an anchor or alias"),
        (MINIMAL + "seed: !!int 5", "line 5 has a tag"),
        (MINIMAL + "name: " + "[" * 2000 + "]" * 2000, "line 5 is nested more than 32 deep"),
        (MINIMAL + "- " * 100_000, "not valid YAML"),
        ("- " * 100_000, "line 1 is nested more than 32 deep"),
        (MINIMAL + f"seed: {'1:' * 100_000}1", "line 5 has a number of 200,001 characters"),
        (MINIMAL + f"x: [{'1,' * 100_000}]", "more than 50,000 values"),
        (MINIMAL + "# " + "x" * 2**20, "is longer than 1,048,576 bytes"),
        (MINIMAL + "seed: 1\n\nseed: 2", "line 7 has the duplicate key seed"),
        (MINIMAL + "eval: {lr: 1.0,\n lr: 1.0}", "line 6 has the duplicate key lr"),
        (MINIMAL + "? [1, 2]\n: 3", "line 5 has a key that is not a string"),
        (MINIMAL + "5: 3", "line 5 has a key that is not a string"),
        (MINIMAL + "2020-01-01: 3", "2020-01-01 is not a key of a recipe"),
        (MINIMAL + "name: ???", r"name=\?\?\? is a placeholder"),
        (MINIMAL + "name: a\n---\nname: b", "not valid YAML"),
        (MINIMAL + "seed: 0x_", "not valid YAML"),
        (MINIMAL + "\n".join(f"k{i}: 1" for i in range(1000)), "; and 995 more"),
        (MINIMAL + f"seed: {'x' * 100_000}", "xxx…: input should be a valid integer"),
        ((MINIMAL + "name: caf\xe9").encode("latin-1"), "is not UTF-8 .* save it as UTF-8"),
    ],
)
def test_files_that_are_no_recipe_are_refused(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    (tmp_path / "r.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=complaint) as failed:
        load_recipe(tmp_path / "r.yaml", [])
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 2000


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; give the path of a recipe"):
        load_recipe(tmp_path / "none.yaml", [])
    with pytest.raises(UserError, match="is a directory; give the path of a recipe"):
        load_recipe(tmp_path, [])
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(UserError, match="is a pipe or a device"):
            load_recipe(path, [])
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        load_recipe(tmp_path / "loop.yaml", [])


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("a" + ".a" * 5000 + "=1", "is not an override"),
        ("name=[" + "[" * 2000, "nested more than 32 deep"),
        ("name=&a [*a]", "anchor or alias"),
        ("phases[0].lr.nan=1", "phases.0..lr"),
        ("phases.first.lr=1", "cannot be applied: index first is out of range for a list of 1"),
    ],
)
def test_overrides_are_read_as_strictly_as_the_file(override: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_recipe(ROOT / "recipes" / "demo-bert.yaml", [override])


def test_a_mapping_adds_to_what_exists_and_missing_sections_are_made() -> None:
    given = ["data.filters.c4.citations=false", "data.filters={gopher_quality: {}}", "phases.0.steps=7"]
    recipe = load_recipe(ROOT / "recipes" / "demo-bert.yaml", given)
    assert recipe.data.filters.c4 is not None and not recipe.data.filters.c4.citations
    assert recipe.data.filters.gopher_quality is not None and recipe.phases[0].steps == 7


@pytest.mark.parametrize("location", ["the file", "an override"])
@pytest.mark.parametrize(
    "text", ["${oc.env:A_SECRET}", "${data.sources}", "texts/${lang", "${oc.decode:x}", "${foo:1}", "${hydra:x}"]
)
def test_nothing_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, text: str) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    in_file = location == "the file"
    path = tmp_path / "r.yaml"
    path.write_text(MINIMAL + (f"tracking: {{experiment: 'x {text}'}}\n" if in_file else ""))
    with pytest.raises(
        UserError, match=r'tracking.experiment contains "\$\{", but recipes have no interpolation'
    ) as failed:
        load_recipe(path, [] if in_file else [f"tracking.experiment='x {text}'"])
    assert "hunter2" not in str(failed.value)


@pytest.mark.parametrize(
    "model", ["family: albert, heads: 2", "family: awd-lstm, heads: null", "family: bilm, heads: null", "family: bert"]
)
def test_a_wrong_width_is_one_mistake_whatever_follows_from_it(model: str) -> None:
    changes = [f"model={{{model}, preset: null, layers: 2, hidden: none, max_positions: 64}}"]
    with pytest.raises(UserError, match=r"model\.hidden") as refused:
        load_recipe(ROOT / "recipes" / "demo.yaml", changes)
    assert ";" not in str(refused.value)


def float_keys(section: type[BaseModel], path: str = "") -> list[str]:
    """Return the dotted keys of all numbers that may be fractions; the first item of a list stands for all items."""
    result = []
    for name, field in section.model_fields.items():
        at = f"{path}.{name}".lstrip(".")
        kinds = [field.annotation]
        while kinds:
            kind = kinds.pop()
            if get_origin(kind) in (list, tuple):
                at += "[0]"
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                result += float_keys(kind, at)
            result += [at] * (kind is float)
            kinds += get_args(kind)
    return sorted(set(result))


@pytest.mark.parametrize("key", float_keys(Recipe))
@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "'inf'", "1e999"])
def test_numbers_are_finite(key: str, value: str) -> None:
    begin = ["data.sources=[{path: x.txt}]", "optimizer.betas=[0.9, 0.99]", "phases[0].batch_ramp=[]"]
    begin += ["data.filters.language={keep: [en]}", "data.decontaminate={against: [x]}", "data.near_duplicates={}"]
    begin += ["phases[0].lr_scaling={rule: sqrt, global_batch_size: 1}", "eval.lr=[1.0]", "eval.epochs=[1.0]"]
    begin += ["eval.tasks=[{name: conll2003, lr: [1.0], epochs: [1.0]}]"]
    if key.endswith("rope_theta"):
        begin += ["model.preset=modernbert-tiny", "model.attention_init=null", "objective.name=mlm"]
    with pytest.raises(UserError, match=rf"{re.escape(key)}=.*: input should be a finite number") as refused:
        load_recipe(ROOT / "recipes" / f"{RECIPE_WITH.get(key, 'demo-bert')}.yaml", [*begin, f"{key}={value}"])
    is_limit = key.split(".")[-1].startswith("max_") or key == "tokenizer.sample_mb"
    assert ("for no limit" in str(refused.value)) == is_limit


PASSWORDS = [
    ("tracking.uri", "http://user:hunter2@host:5000"),
    ("tracking.uri", "https://hunter2@host"),
    ("tracking.uri", "postgresql://user:hunter2@host/db"),
    ("tracking.uri", "postgresql+psycopg2://user:hun/ter2@host/db"),
    ("tracking.uri", "postgresql://host/db?user=u&password=hunter2"),
    ("tracking.uri", "ftp://user:hunter2@host"),
    ("data.sources[0].path", "s3://KEY:hunter2@bucket/x.txt"),
    ("data.sources[0].path", "https://host/x.jsonl?se=2027&sig=hunter2"),
    ("data.sources[0].path", "https://host/x.jsonl?X-Amz-Signature=hunter2"),
    ("data.sources[0].path", "https://host/x.jsonl?a=b&access_%74oken=hunter2"),
    ("data.sources[0].path", "sftp://user:hunter2@host/x.jsonl"),
    ("checkpoint.location", "s3://KEY:hunter2@bucket/x"),
    ("model.init_from", "s3://KEY:hunter2@bucket/x"),
    ("tokenizer.path", "https://u:hunter2@host/vocab.txt"),
    ("eval.data_dir", "https://u:hunter2@host/"),
    ("cluster.address", "ray://u:hunter2@host:10001"),
    ("cluster.address", "u:hunter2@host:6379"),
    ("tracking.experiment", "runs of http://u:hunter2@host"),
    ("engine.deepspeed", "{wandb: {group: 'http://u:hunter2@host'}}"),
    ("no.such.key", "http://u:hunter2@host"),
]


@pytest.mark.parametrize(("key", "value"), PASSWORDS)
def test_passwords_are_refused_anywhere_and_not_shown(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(
        UserError, match=rf"{re.escape(key)}.*(would be written to files and MLflow|it contains an @)"
    ) as failed:
        load_recipe(ROOT / "recipes" / "demo-bert.yaml", [f"{key}={value}"])
    assert "hunter2" not in str(failed.value) and "ter2" not in str(failed.value)


@pytest.mark.parametrize(
    "path", ["http://host:80/a@b/x.txt", "abfs://container@host/x.txt", "s3://b/k=1/x@2.txt", "https://h/x.txt?page=2"]
)
def test_an_address_without_a_password_is_none(path: str) -> None:
    assert (
        load_recipe(ROOT / "recipes" / "demo-bert.yaml", [f"data.sources[0].path='{path}'"]).data.sources[0].path
        == path
    )


@pytest.mark.parametrize(
    "name", ["mlflow.db", "MLflow.db", "mlflow.db-wal", "mlflow.db.lock", "mlartifacts", ".prepared"]
)
def test_a_run_is_not_called_like_the_other_files_beside_it(name: str) -> None:
    with pytest.raises(UserError, match=r"choose another|is not a valid name"):
        load_recipe(ROOT / "recipes" / "demo-bert.yaml", [f"name={name}"])


def test_what_the_command_says_of_a_location_hides_passwords_and_steers_no_terminal() -> None:
    location = "http://user:hunter2@host/\x1b[31m?sig=hunter2"
    command = [sys.executable, "-m", "multihop.cluster.cli.main", "data", "verify", location]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "hunter2" not in ended.stderr and "\x1b" not in ended.stderr
    assert r"http://***@host/\x1b[31m?sig=*** (manifest.json is missing)" in ended.stderr


def test_only_its_owner_reads_a_runs_recipe(tmp_path: Path) -> None:
    with locked_run_dir(tmp_path / "demo", load_recipe(ROOT / "recipes" / "demo-bert.yaml", []), ()):
        assert (tmp_path / "demo" / "recipe.json").stat().st_mode & 0o777 == 0o600


def test_flattening_names_every_leaf() -> None:
    tree = {"a": 1, "b": {"c": [2, {"d": None}]}, "e": {}, "f": []}
    assert flatten(tree) == {"a": 1, "b.c[0]": 2, "b.c[1].d": None, "e": {}, "f": []}
