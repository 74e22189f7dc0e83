"""Compares the model from which training starts, `model.init_from`, with the recipe's."""

import logging
from collections.abc import Mapping
from pathlib import Path

from multihop.common.config import COMPATIBILITY, select_by_effect
from multihop.common.errors import UserError
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.huggingface_config import read_model_config, read_source_vocab_size
from multihop.pretrain.checkpoint.huggingface_import import is_huggingface
from multihop.pretrain.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    folder_of_step,
    read_checkpoint_manifest,
)
from multihop.pretrain.checkpoint.verify import list_steps
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.config import AttentionConfig, ModelConfig
from multihop.pretrain.run.find_checkpoint import checkpoints_at, recorded_model

log = logging.getLogger("multihop")

Shapes = dict[str, list[int]]


def check_parent(config: TrainingConfig) -> None:
    """Refuse a `model.init_from` that is no model, or another than the recipe's, before anything is prepared. Only when
    the data is there can the vocabularies and the tokenizers be compared.

    Raises:
        UserError: It is neither a Hugging Face model nor a checkpoint, nor a run with checkpoints, or has other sizes.
    """
    parent = config.model.init_from
    if parent is None:
        return
    if is_huggingface(Path(parent)):
        theirs, vocab_size, _ = read_model_config(Path(parent))
        vocabularies = vocab_size, read_source_vocab_size(Path(parent))
        trained_len = theirs.max_positions
    else:
        saved = _newest_manifest(parent)
        recorded = None if saved is None else recorded_model(saved)
        if saved is None or recorded is None:
            return
        theirs, vocabularies, trained_len = recorded, (1, None), trained_length(saved, recorded)
    has_same_shapes = shapes_of(theirs, *vocabularies) == shapes_of(config.model, *vocabularies)
    check_same_model(parent, theirs, trained_len, config, has_same_shapes, {}, {})


def _newest_manifest(parent: str) -> CheckpointManifest | None:
    """That of a checkpoint or of a run's newest one; None: it is damaged, and ranks look for another."""
    location = parent
    if open_folder(parent).size(MANIFEST) is None:
        try:
            checkpoints = checkpoints_at(parent)
        except UserError as error:
            raise UserError(f"model.init_from: {error}, or one with Hugging Face's config.json") from None
        location = folder_of_step(checkpoints, list_steps(checkpoints)[-1])
    try:
        return read_checkpoint_manifest(location)
    except ValueError:
        return None


def shapes_of(model: ModelConfig, vocab_size: int, source_vocab_size: int | None) -> Shapes:
    """The shapes of a model's parameters."""
    built = build_model_on_meta(model, vocab_size, source_vocab_size)
    return {name: list(parameter.shape) for name, parameter in built.named_parameters()}


def trained_length(saved: CheckpointManifest, model: ModelConfig) -> int:
    """The longest samples, in tokens, on which a checkpoint was trained; its number of positions if it was imported."""
    phases = (saved.recipe or {}).get("phases", ())
    return max((phase["seq_len"] for phase in phases), default=model.max_positions)


def check_same_model(
    source: str | Path,
    theirs: ModelConfig,
    trained_len: int,
    config: TrainingConfig,
    has_same_shapes: bool,
    their_vocabularies: Mapping[str, int | None],
    our_vocabularies: Mapping[str, int | None],
) -> None:
    """Refuse a parent with other equations, such as other heads, windows or rotary bases, even if all shapes agree.
    Warn if samples are longer than those on which it was trained.

    Args:
        theirs: The parent's model; a phase may give the recipe's another rotary base.
        trained_len: The longest samples on which the parent was trained.
        has_same_shapes: Whether all weights of the parent have the shapes of the recipe's model.
        their_vocabularies, our_vocabularies: Sizes by name; empty where they are compared elsewhere, or not known yet.

    Raises:
        UserError: The models differ.
    """
    model = config.model
    parents = {**select_by_effect(theirs, COMPATIBILITY), **their_vocabularies}
    ours = {**select_by_effect(model, COMPATIBILITY), **our_vocabularies}
    if has_same_shapes:
        del parents["max_positions"]  # no weight depends on it: rotary positions, for example
    windows = [each.causal_windows() if isinstance(each, AttentionConfig) else None for each in (theirs, model)]
    if windows[0] == windows[1]:
        # Of an interval longer than the stack of layers, transformers saves the length of the stack.
        parents.pop("global_attn_every_n_layers", None)
    if differing := [key for key in parents if ours.get(key) != parents[key]]:
        raise UserError(
            f"model.init_from={source} has {', '.join(f'{key}={parents[key]}' for key in differing)}, and this run "
            f"{', '.join(f'{key}={ours.get(key)}' for key in differing)}; set the same values in model, "
            "tokenizer.path to its tokenizer, and tokenizer.add_words for words of your texts"
        )
    longest = max(phase.seq_len for phase in config.phases)
    if longest > trained_len:
        log.warning("%s was trained on samples of at most %d tokens, and these have %d", source, trained_len, longest)
