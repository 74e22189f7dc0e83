"""The model families, as plain torch modules that know nothing of parallelism."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.keyed import key_of
from pretrain.models.albert import Albert
from pretrain.models.bert import Bert
from pretrain.models.gpt import GPT
from pretrain.models.gpt2 import GPT2
from pretrain.models.roberta import Roberta

Model = Bert | Albert | Roberta | GPT | GPT2

_FAMILIES: dict[str, type[Model]] = {"bert": Bert, "albert": Albert, "roberta": Roberta, "gpt": GPT, "gpt2": GPT2}


def outline_model(config: ModelConfig, vocab_size: int) -> Model:
    """The model of a recipe on the meta device: names and shapes that take no memory."""
    with torch.device("meta"):
        return _FAMILIES[config.family](config, vocab_size)


def build_model(config: ModelConfig, vocab_size: int) -> Model:
    """The model of a recipe, its weights not yet set: `initialise` or a checkpoint does that."""
    return outline_model(config, vocab_size).to_empty(device="cpu")


def initialise(model: Model, seed: int) -> None:
    """Initial weights as published, each tensor's drawn from (seed, its name) alone."""
    for name, parameter in model.named_parameters():
        draw(model.config, name, parameter, seed)


def first_weights(config: ModelConfig, seed: int) -> Callable[[str, Tensor], None]:
    """`draw` for a model of this recipe."""
    return lambda name, parameter: draw(config, name, parameter, seed)


@torch.no_grad()
def draw(config: ModelConfig, name: str, parameter: Tensor, seed: int) -> None:
    """Set one parameter's initial weights.

    Biases are 0 and norms 1; all else is normal with a deviation of 0.02. BERT and ALBERT cut it at two deviations
    (`truncated_normal_initializer` in the published code). In GPT-2 the projections back into the residual stream are
    divided by sqrt(2 * layers) (Radford et al. 2019, section 2.3), and positions have 0.01 (its published code).
    """
    generator = torch.Generator().manual_seed(key_of("init", seed, name) >> 1)
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    elif config.family in ("bert", "albert"):
        nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04, generator=generator)
    elif config.family == "gpt2":
        into_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
        std = 0.02 / math.sqrt(2 * config.layers) if into_residual else 0.02
        nn.init.normal_(parameter, std=0.01 if name == "position.weight" else std, generator=generator)
    else:
        nn.init.normal_(parameter, std=0.02, generator=generator)


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter: to matrices, not to biases and norms, as the families were trained.

    Told by its name, for under ZeRO-3 it may have no shape.
    """
    return not name.endswith("bias") and not name.endswith("norm.weight")
