"""The Transformer (Vaswani et al. 2017)."""

from multihop.pretrain.models.family import Family, sizes

FAMILY = Family(
    display_name="Transformer",
    model_class="Transformer",
    causal=False,
    pooling="last",
    objectives=("translation",),
    auto_class="AutoModelForSeq2SeqLM",
    translates=True,
    options={"norm": ("post", "pre"), "positions": ("sinusoidal", "learned")},
    has_output_bias=True,
    xavier=True,  # as in tensor2tensor
    presets={
        "transformer-tiny": sizes(2, 128, 4, 512, intermediate=512),
        "transformer-mini": sizes(3, 256, 4, 512, intermediate=1024),
        # Vaswani et al. 2017, table 3.
        "transformer-base": sizes(6, 512, 8, 512, intermediate=2048),
        "transformer-big": sizes(6, 1024, 16, 512, intermediate=4096, dropout=0.3),
    },
)
