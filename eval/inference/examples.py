"""A few texts completed by a model before and after pretraining: filled masks, or continued prompts.

Torch and the modules that need it are imported in functions, because this module validates recipes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihop.common.config import COMPATIBILITY, select_by_effect
from multihop.common.errors import UserError
from multihop.common.files import read_json_object, sha256_json
from multihop.common.json_lines import Row
from multihop.data_prep.tokenizers.special_tokens import SPECIAL_TOKENS
from multihop.eval.model.model_under_test import ModelUnderTest, open_tokenizer
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES

if TYPE_CHECKING:
    import torch

FILE = "examples.json"
_CANDIDATES = 3
_TOKENS = 20
_TOP_K = 10
"""The likeliest continuations of a small model repeat themselves."""


@dataclass(frozen=True)
class Examples:
    """Everything that a worker needs to make the examples, in plain values."""

    texts: list[str]
    after: ModelUnderTest
    """The model after pretraining."""
    before: ModelUnderTest | None
    """The model before pretraining; None for random weights."""
    seed: int
    """The seed of the random weights."""
    threads: int
    """CPU threads for torch; not part of the key."""

    @property
    def key(self) -> str:
        """SHA-256 of everything that the result depends on."""
        return sha256_json(
            {
                "texts": self.texts,
                "checkpoint": self.after.checkpoint_sha256,
                "tokenizer": self.after.tokenizer_sha256,
                "model": select_by_effect(self.after.model, COMPATIBILITY),
                "before": None
                if self.before is None
                else [self.before.checkpoint_sha256, select_by_effect(self.before.model, COMPATIBILITY)],
                "seed": self.seed,
                "made": [_CANDIDATES, _TOKENS, _TOP_K],
            }
        )


def check_examples(texts: Sequence[str], family: str, mask: str | None) -> None:
    """Refuse texts that a model of the family cannot complete.

    Args:
        mask: mask token, as the tokenizer spells it; None: it has none.

    Raises:
        UserError: a text for a masked model has no mask token, or a prompt for a causal one has.
    """
    for number, text in enumerate(texts):
        key = f"eval.examples[{number}]={text!r}"
        if not FAMILIES[family].causal and not FAMILIES[family].predicts_masks:
            raise UserError(
                f"{key} is for causal and masked models, but model.family={family} is neither; remove eval.examples"
            )
        if not FAMILIES[family].causal:
            if mask is not None and mask not in text:
                raise UserError(f"{key} has no mask token; write {mask} where a token is to be filled in")
        elif masks := {
            tokens["mask"] for tokens in SPECIAL_TOKENS.values() if "mask" in tokens and tokens["mask"] in text
        }:
            raise UserError(
                f"{key} has the mask token {masks.pop()}, but model.family={family} continues texts; write a prompt"
            )


def read_examples(eval_dir: Path, key: str | None) -> Row | None:
    """Return the examples of a run, from `make_examples`; None if the examples of this key have not been made."""
    try:
        made = read_json_object(eval_dir / FILE, advice="remove it and rerun `multihop eval`")
    except FileNotFoundError:
        return None
    return made if key is not None and made.get("key") == key else None


def make_examples(examples: Examples) -> Row:
    """Return the answers of the model with its weights before pretraining and after.

    Returns:
        key; checkpoint_step; examples: for each text {"text", "before", "after"}. An answer of a causal model is the
        continuation; one of a masked model has for each mask the likeliest tokens, {"token", "probability"}.

    Raises:
        UserError: weights are missing or damaged, or a text is too long for the model.
    """
    import torch

    torch.set_num_threads(examples.threads)
    before = _answers(examples, (examples.before or examples.after).model, _weights_before(examples))
    after = _answers(examples, examples.after.model, _weights(examples.after))
    rows = [
        dict(zip(("text", "before", "after"), each, strict=True))
        for each in zip(examples.texts, before, after, strict=True)
    ]
    return {"key": examples.key, "checkpoint_step": examples.after.checkpoint_step, "examples": rows}


def _answers(examples: Examples, model: ModelConfig, weights: "dict[str, torch.Tensor]") -> list[Any]:
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.eval.inference.fill import fill
    from multihop.eval.inference.generate import Sampling, generate
    from multihop.eval.inference.trained_model import with_weights

    after = examples.after
    tokenizer, info = open_tokenizer(after.tokenizer_path)
    trained = with_weights("the model", model, after.vocab_size, weights, tokenizer, info.special_ids)
    if after.data_path is not None:
        # A model trained on pairs reads sources, and so does its parent, so that both get the same input.
        trained = replace(trained, completes=trained.family.causal and read_data_manifest(after.data_path).pairs)
    if trained.family.causal:
        return generate(trained, examples.texts, _TOKENS, Sampling(top_k=_TOP_K))
    return [
        [[{"token": each.token.strip(), "probability": each.probability} for each in mask] for mask in masks]
        for masks in fill(trained, examples.texts, _CANDIDATES)
    ]


def _weights(evaluated: ModelUnderTest) -> "dict[str, torch.Tensor]":
    from multihop.pretrain.checkpoint.huggingface_import import import_model
    from multihop.pretrain.checkpoint.verify import load_weights

    if evaluated.checkpoint_step is None:
        return import_model(Path(evaluated.checkpoint_dir))[2]
    return load_weights(evaluated.checkpoint_dir)


def _weights_before(examples: Examples) -> "dict[str, torch.Tensor]":
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.pretrain.checkpoint.added_tokens import fit_vocabulary
    from multihop.pretrain.models.build import build_model, init_weights

    model = build_model(examples.after.model, examples.after.vocab_size)
    init_weights(model, examples.seed)
    weights = dict(model.state_dict())
    if examples.before is None:
        return weights
    assert examples.after.data_path is not None, "only a run has initial weights"
    tokenizer = read_data_manifest(examples.after.data_path).tokenizer
    return {**weights, **fit_vocabulary(_weights(examples.before), model, tokenizer)}
