"""Outputs of a model for texts before and after pretraining."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.data_prep.tokenizers.tokenizer import load
from multihop.eval.inference.examples import Examples, check_examples, make_examples
from multihop.eval.inference.fill import fill
from multihop.eval.inference.trained_model import TrainedModel
from multihop.eval.model.model_under_test import ModelUnderTest, of_parent, of_run
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.config import ModelConfig

Checkpoint = Callable[[ModelConfig, Path], tuple[str, str]]
MASKED = ["The river [MASK] stone.", "[MASK] and [MASK]"]


def examples_of(config: ModelConfig, data: Path, checkpoint: Checkpoint, texts: list[str], **changes: Any) -> Examples:
    location, sha256 = checkpoint(config, data)
    after = of_run(config, location, sha256, 7, data, read_data_manifest(data))
    return replace(Examples(texts, after, None, seed=3, threads=1), **changes)


def test_masks_before_are_those_of_the_initial_weights(
    bert: ModelConfig, bert_data: Path, checkpoint: Checkpoint
) -> None:
    examples = examples_of(bert, bert_data, checkpoint, MASKED)
    made = make_examples(examples)
    assert made["key"] == examples.key and made["checkpoint_step"] == 7
    info = read_data_manifest(bert_data).tokenizer
    for when, seed in (("before", 3), ("after", 77)):
        model = build_model(bert, info.vocab_size)
        init_weights(model, seed)
        trained = TrainedModel("here", model.eval(), load(bert_data / info.file), info.special_ids)
        for row, masks in zip(made["examples"], fill(trained, MASKED, 3), strict=True):
            assert [[each["token"] for each in mask] for mask in row[when]] == [
                [c.token.strip() for c in m] for m in masks
            ]
    assert [len(row["after"]) for row in made["examples"]] == [1, 2]
    assert {len(mask) for row in made["examples"] for mask in row["after"]} == {3}


def test_a_model_that_began_with_other_weights(
    gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The model's checkpoint is its own parent here, as if pretraining had changed nothing."""
    examples = examples_of(gpt2, gpt2_data, checkpoint, ["The river", ""])
    sha256 = examples.after.checkpoint_sha256

    def parent_at(init_from: str, sha256: str | None) -> ModelUnderTest:
        return of_parent(examples.after, gpt2.model_copy(update={"init_from": init_from}), sha256)

    parent = parent_at(str(tmp_path / "checkpoints"), sha256)
    assert replace(parent, model=gpt2) == examples.after
    assert replace(parent_at(parent.checkpoint_dir, sha256), model=gpt2) == examples.after
    for row in make_examples(replace(examples, before=parent))["examples"]:
        assert row["before"] == row["after"] != ""
    random = make_examples(examples)["examples"]
    assert random[0]["before"] != random[0]["after"]
    with pytest.raises(UserError, match="/nowhere holds no checkpoints"):
        parent_at("/nowhere", sha256)
    with pytest.raises(UserError, match=r"no longer holds the run's initial weights .*restore them"):
        parent_at(parent.checkpoint_dir, "0" * 64)
    with pytest.raises(UserError, match=r"was not initialized from model\.init_from="):
        parent_at(parent.checkpoint_dir, None)


def test_what_identifies_them(gpt2: ModelConfig, gpt2_data: Path, checkpoint: Checkpoint) -> None:
    examples = examples_of(gpt2, gpt2_data, checkpoint, ["The river"])
    other = replace(examples.after, checkpoint_sha256="0")
    for changed in ({"texts": ["A stone"]}, {"seed": 4}, {"before": other}, {"after": other}):
        assert replace(examples, **changed).key != examples.key
    moved = replace(examples.after, checkpoint_dir="/elsewhere", tokenizer_path="/elsewhere/tokenizer.model")
    assert replace(examples, after=moved, threads=9).key == examples.key


def test_texts_that_cannot_be_used_are_refused() -> None:
    check_examples(MASKED, "bert", "[MASK]")
    check_examples(["A <mask>"], "roberta", "<mask>")
    check_examples(["The river", ""], "gpt2", None)
    with pytest.raises(UserError, match=r"eval.examples\[1\]='A \[MASK\]' has no mask token; write <mask>"):
        check_examples(["A <mask>", "A [MASK]"], "roberta", "<mask>")
    with pytest.raises(UserError, match=r"eval.examples\[0\]='A \[MASK\]' has the mask token .* write a prompt"):
        check_examples(["A [MASK]"], "gpt2", None)
    with pytest.raises(UserError, match=r"model\.family=bilm is neither; remove eval\.examples"):
        check_examples(["A [MASK]"], "bilm", "[MASK]")
