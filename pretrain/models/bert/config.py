"""BERT (Devlin et al. 2018)."""

from typing import Annotated, Literal

from multihop.pretrain.models.config import SIZES, EncoderConfig
from multihop.pretrain.models.family import Family, sizes


class BertConfig(EncoderConfig):
    """The recipe's `model` section with `family: bert`."""

    family: Annotated[Literal["bert"], SIZES] = "bert"


FAMILY = Family(
    display_name="BERT",
    config=BertConfig,
    model_class="Bert",
    causal=False,
    pooling="pooler",
    objectives=("mlm+nsp", "mlm"),
    auto_class="AutoModelForPreTraining",
    has_token_types=True,
    presets={
        # Turc et al. 2019, table 1.
        "bert-tiny": sizes(2, 128, 2, 512),
        "bert-mini": sizes(4, 256, 4, 512),
        "bert-small": sizes(4, 512, 8, 512),
        "bert-medium": sizes(8, 512, 8, 512),
        # Devlin et al. 2018, section 3; xlarge: Lan et al. 2020, table 1.
        "bert-base": sizes(12, 768, 12, 512),
        "bert-large": sizes(24, 1024, 16, 512),
        "bert-xlarge": sizes(24, 2048, 32, 512),
    },
)
