"""The model that is evaluated: a run's checkpoint with the run's tokenizer, or a Hugging Face model with its own."""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from multihop.common.errors import UserError
from multihop.common.files import sha256_json
from multihop.data_prep.dataset.manifest import Manifest
from multihop.data_prep.tokenizers.existing import (
    HUGGINGFACE_FILES,
    find_huggingface_tokenizer,
    import_huggingface_tokenizer,
)
from multihop.pretrain.models.config import ModelConfig

if TYPE_CHECKING:
    from multihop.data_prep.tokenizers.info import TokenizerInfo
    from multihop.data_prep.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelUnderTest:
    """The model that is evaluated, in plain values: trials start from its weights."""

    model: ModelConfig
    vocab_size: int
    checkpoint_dir: str
    checkpoint_sha256: str
    checkpoint_step: int | None
    """None for a Hugging Face model."""
    tokenizer_path: str
    tokenizer_sha256: str
    data_path: str | None
    """The run's data set; None for a Hugging Face model."""
    data_fingerprint: str | None
    target_tokenizer_path: str | None = None
    """The target's tokenizer of an encoder-decoder model with two vocabularies, of which `vocab_size` is the size."""
    source_vocab_size: int | None = None
    heldout_sha256: str | None = None
    """SHA-256 of the run's held-out documents as tokens; None for a Hugging Face model."""


def of_run(
    model: ModelConfig, checkpoint_dir: str, sha256: str, step: int, data_path: Path, data: Manifest
) -> ModelUnderTest:
    """Describe a checkpoint of a run and its data set."""
    return ModelUnderTest(
        model=model,
        vocab_size=data.output_tokenizer.vocab_size,
        checkpoint_dir=checkpoint_dir,
        checkpoint_sha256=sha256,
        checkpoint_step=step,
        tokenizer_path=str(data_path / data.tokenizer.file),
        tokenizer_sha256=data.tokenizers_sha256,
        data_path=str(data_path),
        data_fingerprint=data.fingerprint,
        target_tokenizer_path=None if data.target_tokenizer is None else str(data_path / data.target_tokenizer.file),
        source_vocab_size=data.source_vocab_size,
        heldout_sha256=sha256_json([shard.sha256 for shard in data.of_split("heldout")]),
    )


def of_huggingface(folder: Path) -> ModelUnderTest:
    """Describe the model in a directory with config.json, model.safetensors and a tokenizer. The weights are hashed,
    not loaded.

    Raises:
        UserError: it is not such a directory, or its model or tokenizer is of an unsupported kind.
    """
    from multihop.pretrain.checkpoint.huggingface_config import read_model_config
    from multihop.pretrain.checkpoint.huggingface_import import content_hash

    folder = folder.absolute()
    model, vocab_size, _ = read_model_config(folder)
    tokenizer = find_huggingface_tokenizer(folder)
    if tokenizer is None:
        raise UserError(
            f"{folder} has no tokenizer; expected one of {', '.join(HUGGINGFACE_FILES)}; copy the model "
            "with its tokenizer"
        )
    info = open_tokenizer(str(tokenizer))[1]
    if info.vocab_size > vocab_size:
        raise UserError(
            f"{folder}: {tokenizer.name} has {info.vocab_size} tokens and the model {vocab_size}; copy "
            "both from one model"
        )
    return ModelUnderTest(
        model=model,
        vocab_size=vocab_size,
        checkpoint_dir=str(folder),
        checkpoint_sha256=content_hash(folder),
        checkpoint_step=None,
        tokenizer_path=str(tokenizer),
        tokenizer_sha256=info.sha256,
        data_path=None,
        data_fingerprint=None,
    )


def of_path(path: str) -> ModelUnderTest:
    """Describe the newest good checkpoint of a run, or a Hugging Face model.

    Raises:
        UserError: there is none.
    """
    from multihop.pretrain.checkpoint.huggingface_import import is_huggingface
    from multihop.pretrain.run.find_checkpoint import find_checkpoint

    if is_huggingface(Path(path)):
        return of_huggingface(Path(path))
    found = find_checkpoint(path if "://" in path else str(Path(path).absolute()))  # workers start elsewhere
    data_folder = found.data_folder.absolute()
    return of_run(
        found.model, found.location, found.manifest.content_hash(), found.manifest.step, data_folder, found.data
    )


def of_parent(evaluated: ModelUnderTest, model: ModelConfig, sha256: str | None) -> ModelUnderTest:
    """Return the model that the training began with: its initial weights, and the rotary base before the first phase.

    Args:
        model: the recipe's `model`, with `init_from`.
        sha256: content hash of these weights, `parent` in the manifest of a checkpoint of the run.

    Raises:
        UserError: They are no longer at `init_from`.
    """
    from multihop.pretrain.checkpoint.huggingface_import import content_hash, is_huggingface
    from multihop.pretrain.run.find_checkpoint import find_checkpoint_by_hash

    init_from = str(model.init_from)
    if sha256 is None:
        raise UserError(f"the run was not initialized from model.init_from={init_from}; set its original value")
    folder = Path(init_from)
    location: tuple[str, int | None] | None = None
    if not is_huggingface(folder):
        location = find_checkpoint_by_hash(init_from, sha256)
    elif content_hash(folder) == sha256:
        location = (str(folder), None)
    if location is None:
        raise UserError(
            f"model.init_from={init_from} no longer holds the run's initial weights (content hash "
            f"{sha256[:12]}…); restore them"
        )
    return replace(
        evaluated,
        model=model,
        checkpoint_dir=location[0],
        checkpoint_sha256=sha256,
        checkpoint_step=location[1],
    )


@lru_cache(maxsize=2)
def open_tokenizer(path: str, pairs: bool = False) -> "tuple[Tokenizer, TokenizerInfo]":
    """Open a tokenizer, once in a process, and describe it as training needs it.

    Args:
        pairs: whether it is of an encoder-decoder (translation) model.

    Raises:
        UserError: the file is not a tokenizer that we read.
    """
    from multihop.data_prep.tokenizers.tokenizer import describe, parse

    content = import_huggingface_tokenizer(Path(path), pairs)
    return parse(content), describe(content, hashlib.sha256(content).hexdigest(), pairs)
