"""RoBERTa (Liu et al. 2019)."""

from typing import Annotated, Literal

from multihop.pretrain.models.config import SIZES, EncoderConfig
from multihop.pretrain.models.family import Family, sizes


class RobertaConfig(EncoderConfig):
    """The recipe's `model` section with `family: roberta`."""

    family: Annotated[Literal["roberta"], SIZES] = "roberta"


FAMILY = Family(
    display_name="RoBERTa",
    config=RobertaConfig,
    model_class="Roberta",
    causal=False,
    pooling="first",
    objectives=("mlm",),
    pair_separators=2,  # </s></s>, as in the published code
    auto_class="AutoModelForMaskedLM",
    presets={
        # Liu et al. 2019, section 5.
        "roberta-base": sizes(12, 768, 12, 512),
        "roberta-large": sizes(24, 1024, 16, 512),
    },
)
