"""What the stages of a run refuse before they start."""

import string
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForPreTraining, BertModel

from multihop.cluster.runs.checkpoints import import_checkpoint
from multihop.cluster.runs.recipe import Recipe
from multihop.cluster.runs.stages import run_stages
from multihop.common.errors import UserError
from multihop.common.json_lines import append_row

TINY = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 512,
}
"""The sizes of the preset bert-tiny."""


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ({"features": {"layers": [3]}}, "the model has 2 layers and no hidden state 3"),
        ({"inits": ["pretrained", "parent"]}, r"eval.inits has parent, .* but model.init_from is not set"),
    ],
)
def test_a_recipe_that_does_not_fit_the_model_is_refused_before_anything_starts(
    tmp_path: Path, section: dict[str, Any], complaint: str
) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "frozen",
            "data": {"sources": [{"path": "texts/"}]},
            "model": {"preset": "bert-tiny"},
            "phases": [{"steps": 10}],
            "eval": section,
        }
    )
    with pytest.raises(UserError, match=complaint):
        run_stages(recipe, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_whose_checkpoints_are_missing_is_not_restarted(texts: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "run",
            "data": {"sources": [{"path": str(texts)}]},
            "model": {"preset": "bert-tiny"},
            "phases": [{"steps": 10}],
            "checkpoint": {"location": str(tmp_path / "volume")},
        }
    )
    append_row(tmp_path / "runs" / "run" / "metrics.jsonl", {"step": 10, "loss": 1.0})
    with pytest.raises(UserError, match=r"volume/run holds no checkpoints of .*mount the volume"):
        run_stages(recipe, tmp_path / "runs")


def test_a_published_model_with_another_tokenizer_is_refused_before_the_data_are_prepared(
    texts: Path, tmp_path: Path
) -> None:
    parent, runs = tmp_path / "parent", tmp_path / "runs"
    BertForPreTraining(BertConfig(**TINY)).save_pretrained(parent)
    recipe = Recipe.model_validate(
        {
            "name": "child",
            "data": {"sources": [{"path": str(texts)}]},
            "model": {"preset": "bert-tiny", "init_from": str(parent)},
            "phases": [{"steps": 10}],
        }
    )
    with pytest.raises(UserError, match=r"was trained with its own tokenizer, and this recipe trains one"):
        run_stages(recipe, runs)
    assert not list(runs.rglob("manifest.json"))


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_a_parent_of_other_sizes_is_refused_before_the_data_are_prepared(
    is_checkpoint: bool, texts: Path, tmp_path: Path
) -> None:
    parent = tmp_path / "parent"
    BertForPreTraining(BertConfig(**TINY)).save_pretrained(parent)
    if is_checkpoint:
        import_checkpoint(parent, tmp_path / "imported")
        parent = tmp_path / "imported"
    content: dict[str, Any] = {
        "name": "child",
        "data": {"sources": [{"path": str(texts)}]},
        "phases": [{"steps": 10}],
        "tokenizer": {"path": str(tmp_path / "tokenizer.json")},
    }
    for changes, differing in (
        ({"heads": 1}, r"heads=2, and this run heads=1;"),
        (
            {"layers": 3, "max_positions": 600},
            r"layers=2, max_positions=512, and this run layers=3, max_positions=600;",
        ),
    ):
        model = {"preset": "bert-tiny", "init_from": str(parent), **changes}
        with pytest.raises(UserError, match=rf"^model\.init_from={parent} has {differing}"):
            run_stages(Recipe.model_validate({**content, "model": model}), tmp_path / "runs")
        assert not list((tmp_path / "runs").rglob("manifest.json"))


@pytest.mark.parametrize("section", ["model", "eval"])
def test_a_published_model_without_its_output_layer_is_refused_where_a_task_predicts_tokens(
    section: str, texts: Path, tmp_path: Path
) -> None:
    parent = tmp_path / "parent"
    config = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(parent)
    (parent / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase])
    )
    (tmp_path / "letters.txt").write_text("a b c\n")
    (tmp_path / "letters.yaml").write_text("kind: perplexity\ntest: letters.txt\n")
    evaluation = {"tasks": [str(tmp_path / "letters.yaml")], "inits": ["pretrained", "parent"]}
    model = {"preset": "bert-tiny"}
    if section == "model":
        model["init_from"] = str(parent)
    else:
        evaluation |= {"checkpoint": str(parent), "inits": ["pretrained"]}
    recipe = Recipe.model_validate(
        {
            "name": "child",
            "data": {"sources": [{"path": str(texts)}]},
            "model": model,
            "phases": [{"steps": 10}],
            "eval": evaluation,
        }
    )
    with pytest.raises(UserError, match="parent has no weights for predicting tokens, which task letters needs; use"):
        run_stages(recipe, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_parent_that_does_not_exist_is_refused_before_the_data_are_prepared(texts: Path, tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "child",
            "data": {"sources": [{"path": str(texts)}]},
            "model": {"preset": "bert-tiny", "init_from": str(tmp_path / "nowhere")},
            "phases": [{"steps": 10}],
        }
    )
    with pytest.raises(
        UserError, match=r"^model\.init_from: \S+nowhere holds no checkpoints; give a run's directory, "
    ):
        run_stages(recipe, tmp_path / "runs")
    assert not list((tmp_path / "runs").rglob("manifest.json"))
