"""GPT (Radford et al. 2018)."""

from typing import Annotated, Literal

from multihop.pretrain.models.config import SIZES, CausalConfig
from multihop.pretrain.models.family import Family, sizes


class GPTConfig(CausalConfig):
    """The recipe's `model` section with `family: gpt`."""

    family: Annotated[Literal["gpt"], SIZES] = "gpt"


FAMILY = Family(
    display_name="GPT",
    config=GPTConfig,
    model_class="GPT",
    causal=True,
    pooling="last",
    objectives=("clm", "completion"),
    auto_class="AutoModelForCausalLM",
    presets={
        # Radford et al. 2018, section 4.1.
        "gpt": sizes(12, 768, 12, 512),
    },
)
