"""Paths of a recipe that is sent to a cluster."""

from pathlib import Path

import pytest
import yaml
from workplace import make_workplace

from multihop.cluster.jobs.submit import load_for_cluster
from multihop.common.errors import UserError

SHARED = "data.sources[0].path=/shared/texts"
FILTER = "data.filters={c4: {bad_words: bad.txt}}"
AGAINST = "data.decontaminate={against: [/shared/glue.txt, own/*.txt]}"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.sources[0].path=texts", "data.sources[0].path=texts"),
        ("data.sources[0].path=texts:2024/a.txt", "data.sources[0].path=texts:2024/a.txt"),
        (AGAINST, "data.decontaminate.against[1]=own/*.txt"),
        (FILTER, "data.filters.c4.bad_words=bad.txt"),
        ("tokenizer={path: tok}", "tokenizer.path=tok"),
        ("model.init_from=old/checkpoints/step-00000010", "model.init_from=old/checkpoints/step-00000010"),
        ("checkpoint.location=ckpts", "checkpoint.location=ckpts"),
        ("tracking.uri=sqlite:///x.db", "tracking.uri=sqlite:///x.db"),
        ("eval.data_dir=tasks", "eval.data_dir=tasks"),
        ("eval.checkpoint=models/bert", "eval.checkpoint=models/bert"),
        ("eval.tasks=[glue/sst2, {name: own.yaml}]", "eval.tasks[1]=own.yaml"),
    ],
)
def test_relative_paths_are_refused(texts: Path, tmp_path: Path, override: str, key: str) -> None:
    recipe = make_workplace(tmp_path, texts, "small", 1) / "recipe.yaml"
    content = yaml.safe_load(recipe.read_text())
    if key.startswith("tokenizer.path"):
        del content["tokenizer"]  # of settings of training
    recipe.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError) as refused:
        load_for_cluster(recipe, [SHARED, override], "/shared/runs")
    assert str(refused.value).startswith(f"{key} is relative; ")


def test_the_directory_of_the_runs_must_be_absolute_too(texts: Path, tmp_path: Path) -> None:
    recipe = make_workplace(tmp_path, texts, "small", 1) / "recipe.yaml"
    with pytest.raises(UserError, match=r"^--runs=runs is relative"):
        load_for_cluster(recipe, [SHARED], "runs")
    assert load_for_cluster(recipe, [SHARED], "s3://bucket/runs").checkpoint.location == "s3://bucket/runs/.checkpoints"


def test_absolute_paths_and_uris_are_accepted(texts: Path, tmp_path: Path) -> None:
    recipe = make_workplace(tmp_path, texts, "small", 1) / "recipe.yaml"
    given = ["data.sources[0].path=package:nltk/*.txt", "checkpoint.location=s3://bucket/all", "eval.data_dir=/tasks"]
    result = load_for_cluster(recipe, [*given, "tracking.uri=sqlite:////shared/mlflow.db"], "/shared/runs")
    assert result.checkpoint.location == "s3://bucket/all"
    assert load_for_cluster(recipe, [SHARED, "tracking.uri=http://mlflow:5000"], None).checkpoint.location is None
