"""RoBERTa (Liu et al. 2019)."""

from multihop.pretrain.models.family import Family, sizes

FAMILY = Family(
    display_name="RoBERTa",
    model_class="Roberta",
    causal=False,
    pooling="first",
    objectives=("mlm",),
    pair_separators=2,  # </s></s>, as in the published code
    auto_class="AutoModelForMaskedLM",
    options={"positions": (None, "relative")},
    has_output_bias=True,
    presets={
        # Liu et al. 2019, section 5.
        "roberta-base": sizes(12, 768, 12, 512),
        "roberta-large": sizes(24, 1024, 16, 512),
    },
)
