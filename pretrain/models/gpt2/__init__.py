"""GPT-2 (Radford et al. 2019)."""

from multihop.pretrain.models.family import Family, sizes

FAMILY = Family(
    display_name="GPT-2",
    model_class="GPT2",
    causal=True,
    pooling="last",
    objectives=("clm",),
    auto_class="AutoModelForCausalLM",
    options={"positions": (None, "relative")},
    scaled_residual=True,  # Radford et al. 2019, section 2.3
    position_std=0.01,  # as in the published code
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
