"""Builds the torch module of a recipe's `model` section, with its initial weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multihop.common.counter_rng import key_of
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.families import FAMILIES, family_module
from multihop.pretrain.models.layers.init import STD
from multihop.pretrain.models.layers.model import Model

ParamInit = Callable[[str, Tensor], None]
"""Sets the initial values of a parameter in place, given its name."""

_EMBEDDINGS = ("word.weight", "position.weight", "segment.weight")


class _SkipInit(TorchFunctionMode):
    """Skips torch's initial values, which parameters on the meta device do not have; drawing them there imports torch's
    compiler."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__ and "tensor" in kwargs:
            return kwargs["tensor"]
        return func(*args, **kwargs)


def build_model_on_meta(config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> Model:
    """The model of a recipe on the meta device: it has names and shapes, and takes no memory.

    Args:
        source_vocab_size: the size of the source's vocabulary if a translating family has separate vocabularies;
            `vocab_size` is then the target's.
    """
    module = family_module(config.family, "model")
    model_class: Callable[..., Model] = getattr(module, FAMILIES[config.family].model_class)
    with torch.device("meta"), _SkipInit():
        if source_vocab_size is None:
            return model_class(config, vocab_size)
        assert FAMILIES[config.family].translates, "only a translating family has two vocabularies"
        return model_class(config, vocab_size, source_vocab_size)


def build_model(config: ModelConfig, vocab_size: int, source_vocab_size: int | None = None) -> Model:
    """The model of a recipe on the CPU with uninitialized weights: call `init_weights` or load a checkpoint.

    Args:
        source_vocab_size: as in `build_model_on_meta`.
    """
    return build_model_on_meta(config, vocab_size, source_vocab_size).to_empty(device="cpu")


def init_weights(model: Model, seed: int) -> None:
    """Set the initial weights as published; each tensor is drawn with a key of the seed and its name alone."""
    for name, parameter in model.named_parameters():
        init_parameter(model, name, parameter, seed)


@torch.no_grad()
def init_parameter(model: Model, name: str, parameter: Tensor, seed: int) -> None:
    """Set one parameter's initial values: biases are 0, norms 1, and matrices and embeddings as the family says."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        generator = torch.Generator().manual_seed(key_of("init", seed, name) >> 1)
        model.init_matrix(name, parameter, generator)


def make_param_init(
    model: Model,
    seed: int,
    unigram: NDArray[np.float64] | None = None,
    vectors: NDArray[np.float32] | None = None,
) -> ParamInit:
    """A function that calls `init_parameter`, and applies `model.output_bias` and `model.word_init`.

    Args:
        unigram: float64 (V,), the log of each token's frequency; needed for `model.output_bias: unigram`.
        vectors: float32 (V, E), rows of length 1, or 0 for tokens that do not occur; needed for `model.word_init:
            cooccurrences`. Tokens that do not occur get random vectors of about this length.
    """
    config = model.config

    @torch.no_grad()
    def param_init(name: str, parameter: Tensor) -> None:
        init_parameter(model, name, parameter, seed)
        if config.needs_token_counts and name == "word_bias":
            assert unigram is not None
            parameter.copy_(torch.from_numpy(unigram))
        if config.needs_word_vectors and name in _EMBEDDINGS:
            parameter.mul_(config.embedding_width**-0.5 / STD)  # keeps the ratios of their norms
            if name == "word.weight":
                assert vectors is not None
                occurs = torch.from_numpy(vectors.any(axis=1))
                parameter[occurs] = torch.from_numpy(vectors)[occurs].to(parameter)

    return param_init


def uses_weight_decay(name: str) -> bool:
    """Whether weight decay applies to a parameter: to matrices, not to biases and norms, as the families were trained;
    and to XLNet's biases in the scores of attention, as by its authors' code (`include_in_weight_decay`).

    Decided by its name, because under ZeRO-3 it may have no shape.
    """
    if name.endswith(("content_bias", "position_bias", "segment_bias")):
        return True
    return not name.endswith("bias") and not name.endswith("norm.weight")
