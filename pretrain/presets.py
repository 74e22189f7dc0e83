"""The published sizes of the model families."""

from typing import Any, Literal

Family = Literal["bert", "albert", "roberta", "gpt", "gpt2"]

OBJECTIVES: dict[Family, str] = {"bert": "mlm+nsp", "albert": "mlm+sop", "roberta": "mlm", "gpt": "clm", "gpt2": "clm"}
"""What each family is pretrained by."""

# layers, hidden, heads, positions. The vocabulary is the data's.
_SIZES: dict[str, tuple[str, int, int, int, int]] = {
    # Turc et al. 2019, table 1.
    "bert-tiny": ("bert", 2, 128, 2, 512),
    "bert-mini": ("bert", 4, 256, 4, 512),
    "bert-small": ("bert", 4, 512, 8, 512),
    "bert-medium": ("bert", 8, 512, 8, 512),
    # Devlin et al. 2018, section 3; xlarge: Lan et al. 2020, table 1.
    "bert-base": ("bert", 12, 768, 12, 512),
    "bert-large": ("bert", 24, 1024, 16, 512),
    "bert-xlarge": ("bert", 24, 2048, 32, 512),
    # Lan et al. 2020, table 1; heads as in the released models (the paper has hidden / 64 of them).
    "albert-base": ("albert", 12, 768, 12, 512),
    "albert-large": ("albert", 24, 1024, 16, 512),
    "albert-xlarge": ("albert", 24, 2048, 16, 512),
    "albert-xxlarge": ("albert", 12, 4096, 64, 512),
    # Liu et al. 2019, section 5.
    "roberta-base": ("roberta", 12, 768, 12, 512),
    "roberta-large": ("roberta", 24, 1024, 16, 512),
    # Radford et al. 2018, section 4.1.
    "gpt": ("gpt", 12, 768, 12, 512),
    # Radford et al. 2019, table 2; the names of the sizes are those under which they were released.
    "gpt2": ("gpt2", 12, 768, 12, 1024),
    "gpt2-medium": ("gpt2", 24, 1024, 16, 1024),
    "gpt2-large": ("gpt2", 36, 1280, 20, 1024),
    "gpt2-xl": ("gpt2", 48, 1600, 25, 1024),
    # Shoeybi et al. 2019, table 2.
    "gpt2-8.3b": ("gpt2", 72, 3072, 24, 1024),
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {"family": family, "layers": layers, "hidden": hidden, "heads": heads, "max_positions": positions}
    | ({"embedding": 128} if family == "albert" else {})
    for name, (family, layers, hidden, heads, positions) in _SIZES.items()
}
