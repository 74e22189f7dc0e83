"""GPT (Radford et al. 2018)."""

from multihop.pretrain.models.family import Family, sizes

FAMILY = Family(
    display_name="GPT",
    model_class="GPT",
    causal=True,
    pooling="last",
    objectives=("clm",),
    auto_class="AutoModelForCausalLM",
    options={"positions": (None, "relative")},
    presets={
        # Radford et al. 2018, section 4.1.
        "gpt": sizes(12, 768, 12, 512),
    },
)
