"""The model families, as plain torch modules that know nothing of parallelism."""

import math

import torch
from torch import nn

from pretrain.config import ModelConfig
from pretrain.keyed import key_of
from pretrain.models.bert import Bert
from pretrain.models.gpt2 import GPT2

Model = Bert | GPT2


def build_model(config: ModelConfig, vocab_size: int) -> Model:
    """The model of a recipe, its weights not yet set: `initialise` or a checkpoint does that."""
    with torch.device("meta"):
        model = Bert(config, vocab_size) if config.family == "bert" else GPT2(config, vocab_size)
    return model.to_empty(device="cpu")


@torch.no_grad()
def initialise(model: Model, seed: int) -> None:
    """Initial weights as published, each tensor's drawn from (seed, its name) alone.

    BERT: normal with deviation 0.02 cut at two deviations; GPT-2: normal with deviation 0.02, the projections back
    into the residual stream divided by sqrt(2 * layers) (Radford et al. 2019, section 2.3). Biases 0, norms 1.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(key_of("init", seed, name) >> 1)
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        elif model.config.family == "bert":
            nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04, generator=generator)
        else:
            into_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            std = 0.02 / math.sqrt(2 * model.config.layers) if into_residual else 0.02
            nn.init.normal_(parameter, std=std, generator=generator)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: to matrices, not to biases and layer norms, as BERT and GPT-2 were trained."""
    return parameter.ndim > 1
