"""ALBERT (Lan et al. 2020)."""

from multihop.pretrain.models.family import Family, sizes

FAMILY = Family(
    display_name="ALBERT",
    model_class="Albert",
    causal=False,
    pooling="pooler",
    objectives=("mlm+sop", "mlm"),
    auto_class="AutoModelForPreTraining",
    options={"positions": (None, "relative")},
    has_output_bias=True,
    has_segments=True,
    factorized_embedding=True,
    truncated_normal=True,  # `truncated_normal_initializer` in the published code
    presets={
        # Lan et al. 2020, table 1; heads as in the released models (the paper has hidden / 64 of them).
        "albert-base": sizes(12, 768, 12, 512, embedding=128),
        "albert-large": sizes(24, 1024, 16, 512, embedding=128),
        "albert-xlarge": sizes(24, 2048, 16, 512, embedding=128),
        "albert-xxlarge": sizes(12, 4096, 64, 512, embedding=128),
    },
)
