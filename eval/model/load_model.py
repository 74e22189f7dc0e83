"""Loads the model under test, with the verified weights of a checkpoint, or random ones."""

from functools import lru_cache
from pathlib import Path

import torch

from multihop.common.errors import UserError
from multihop.data_prep.tokenizers.info import TokenizerInfo
from multihop.pretrain.checkpoint.added_tokens import fit_vocabulary
from multihop.pretrain.checkpoint.huggingface_import import content_hash, import_model
from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.reader import CheckpointReader
from multihop.pretrain.checkpoint.verify import verify
from multihop.pretrain.engine.device import use_expandable_segments
from multihop.pretrain.models.build import build_model, init_parameter, init_weights
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.layers.model import Model


def load_model(
    config: ModelConfig,
    vocab_size: int,
    source_vocab_size: int | None,
    checkpoint: tuple[str, str] | None,
    step: int | None,
    seed: int,
    tokenizer: TokenizerInfo | None = None,
) -> Model:
    """Load a model on the CPU.

    Args:
        vocab_size, source_vocab_size: as `build_model`.
        checkpoint: location and content hash of the weights; None: random weights.
        step: step of the checkpoint; None: the location is a Hugging Face model.
        seed: keys random weights, and those of a head that a Hugging Face model lacks.
        tokenizer: of a run whose vocabulary has added tokens, which the weights at its beginning do not have; None: it
            has none.

    Raises:
        UserError: a file is missing or damaged, or the content hash is another.
    """
    model = build_model(config, vocab_size, source_vocab_size)
    if checkpoint is None:
        init_weights(model, seed)
        return model
    if step is not None:
        with CheckpointReader(checkpoint[0], _verify(*checkpoint)) as reader:
            weights = dict(reader.weights())
            model.load_state_dict(weights if tokenizer is None else fit_vocabulary(weights, model, tokenizer))
        return model
    weights = huggingface_weights(*checkpoint)
    if tokenizer is not None:
        weights = fit_vocabulary(weights, model, tokenizer)
    for name, parameter in model.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])
        else:  # a head that the files lack
            init_parameter(model, name, parameter, seed)
    return model


def device() -> torch.device:
    """Return the GPU where torch sees one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    use_expandable_segments()
    return torch.device("cuda")


@lru_cache(maxsize=2)  # the evaluated model, and that of eval.average_with
def _verify(checkpoint: str, sha256: str) -> CheckpointManifest:
    """Return the checkpoint's manifest, after verifying its files once per process for all its trials.

    Raises:
        UserError: a file is missing or damaged, or it is not the checkpoint that the trial was planned with.
    """
    manifest = verify(checkpoint)
    if manifest.content_hash() != sha256:
        raise UserError(f"{checkpoint} is not the checkpoint that the trials were planned with; run the command again")
    return manifest


@lru_cache(maxsize=2)
def huggingface_weights(folder: str, sha256: str) -> dict[str, torch.Tensor]:
    """Return the weights by our names, hashed and mapped once per process for all its trials.

    Raises:
        UserError: the files are not those that the trial was planned with.
    """
    if content_hash(Path(folder)) != sha256:
        raise UserError(f"{folder} is not the model that the trials were planned with; run the command again")
    return import_model(Path(folder))[2]
