"""GPT-2 (Radford et al. 2019)."""

from typing import Annotated, Literal

from multihop.pretrain.models.config import SIZES, CausalConfig
from multihop.pretrain.models.family import Family, sizes


class GPT2Config(CausalConfig):
    """The recipe's `model` section with `family: gpt2`."""

    family: Annotated[Literal["gpt2"], SIZES] = "gpt2"


FAMILY = Family(
    display_name="GPT-2",
    config=GPT2Config,
    model_class="GPT2",
    causal=True,
    pooling="last",
    objectives=("clm", "completion"),
    auto_class="AutoModelForCausalLM",
    presets={
        # Radford et al. 2019, table 2; the names of the sizes are those under which they were released.
        "gpt2": sizes(12, 768, 12, 1024),
        "gpt2-medium": sizes(24, 1024, 16, 1024),
        "gpt2-large": sizes(36, 1280, 20, 1024),
        "gpt2-xl": sizes(48, 1600, 25, 1024),
        # Shoeybi et al. 2019, table 2.
        "gpt2-8.3b": sizes(72, 3072, 24, 1024),
    },
)
