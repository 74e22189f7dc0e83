"""From a recipe's `model` section to a torch module with its initial weights."""

import math
from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from multihop.common.counter_rng import key_of
from multihop.pretrain.models.common.model import Model
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.neighbours import add_neighbours

_STD = 0.02
"""Of weights that are drawn, unless the family declares another."""
_EMBEDDINGS = ("word.weight", "position.weight", "segment.weight", "source_word.weight", "source_position.weight")


def build_model_on_meta(config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> Model:
    """The model of a recipe on the meta device: names and shapes that take no memory.

    Args:
        source_vocab_size: where source and target of a translating family have vocabularies of their own, the
            source's size; `vocab_size` is then the target's.
    """
    module = import_module(f"multihop.pretrain.models.{config.family}.model")
    model_class: Callable[..., Model] = getattr(module, FAMILIES[config.family].model_class)
    with torch.device("meta"):
        if source_vocab_size is None:
            return model_class(config, vocab_size)
        assert FAMILIES[config.family].translates, "only a translating family has two vocabularies"
        return model_class(config, vocab_size, source_vocab_size)


def build_model(config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> Model:
    """The model of a recipe on the CPU with uninitialised weights: call `initialise` or load a checkpoint.

    Args:
        source_vocab_size: as in `build_model_on_meta`.
    """
    return build_model_on_meta(config, vocab_size, source_vocab_size).to_empty(device="cpu")


def initialise(model: Model, seed: int) -> None:
    """Set the initial weights as published, each tensor drawn from (seed, its name) alone."""
    for name, parameter in model.named_parameters():
        draw(model.config, name, parameter, seed)


def first_weights(
    config: ModelConfig,
    seed: int,
    unigram: NDArray[np.float64] | None = None,
    vectors: NDArray[np.float32] | None = None,
) -> Callable[[str, Tensor], None]:
    """`draw` for a model of this recipe, and what `model.output_bias` and `model.word_init` take from the text.

    Args:
        unigram: float64 (V,), the log of each token's frequency; only `model.output_bias: unigram` needs it.
        vectors: float32 (V, E), rows of length 1, or 0 for tokens that do not occur; only `model.word_init:
            cooccurrences` needs them. Tokens that do not occur get random vectors of about this length.
    """

    @torch.no_grad()
    def fill(name: str, parameter: Tensor) -> None:
        draw(config, name, parameter, seed)
        if name == "word_bias" and config.output_bias == "unigram":
            assert unigram is not None
            parameter.copy_(torch.from_numpy(unigram))
        if config.word_init == "cooccurrences" and name in _EMBEDDINGS:
            parameter.mul_(config.embedding**-0.5 / _STD)  # as large, beside each other, as they were drawn
            if name == "word.weight":
                assert vectors is not None
                occurs = torch.from_numpy(vectors.any(axis=1))
                parameter[occurs] = torch.from_numpy(vectors)[occurs].to(parameter)

    return fill


@torch.no_grad()
def draw(config: ModelConfig, name: str, parameter: Tensor, seed: int) -> None:
    """Set one parameter's initial weights.

    Biases are 0 and norms 1; all else is normal with a standard deviation of 0.02, but for what the family declares
    (another deviation or distribution) and what `model.attention_init` changes.
    """
    family = FAMILIES[config.family]
    generator = torch.Generator().manual_seed(key_of("init", seed, name) >> 1)
    std = family.position_std if name == "position.weight" else _STD
    if family.scaled_residual and name.endswith(("attention.output.weight", "feed_forward.down.weight")):
        std /= math.sqrt(2 * config.layers)
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    elif family.uniform is not None:
        nn.init.uniform_(parameter, -family.uniform, family.uniform, generator=generator)
    elif family.xavier:
        if name in _EMBEDDINGS:
            nn.init.normal_(parameter, std=config.hidden**-0.5, generator=generator)
        else:
            nn.init.xavier_uniform_(parameter, generator=generator)
    elif family.truncated_normal:
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std, generator=generator)
    else:
        nn.init.normal_(parameter, std=std, generator=generator)
    if config.attention_init == "neighbours":
        add_neighbours(config, name, parameter)


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to matrices, not to biases and norms, as the families were trained.

    Decided by its name, because under ZeRO-3 it may have no shape.
    """
    return not name.endswith("bias") and not name.endswith("norm.weight")
