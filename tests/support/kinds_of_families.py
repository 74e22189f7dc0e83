"""The families and objectives by what they are trained on."""

import typing
from typing import Any

from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import OBJECTIVES as NEEDS
from multihop.pretrain.objectives.config import ObjectiveConfig

TEXT_FAMILIES = {
    name: family
    for name, family in FAMILIES.items()
    if not family.translates and ("heads" in family.config.model_fields or family.causal)
}
"""Families that are an encoder or a decoder alone, with attention or causal."""
AT_HUGGING_FACE = {name: family for name, family in TEXT_FAMILIES.items() if family.auto_class is not None}
"""Text families that a class of transformers loads."""
STACKED = {"awd-lstm-backward": FAMILIES["awd-lstm-backward"], **TEXT_FAMILIES, "bilm": FAMILIES["bilm"]}
"""These, and those with layers of another kind that the same tests hold for."""
RELATIVE = {name: family for name, family in TEXT_FAMILIES.items() if "max_distance" in family.config.model_fields}
"""Text families that can have relative positions."""
TRANSLATING = {name: family for name, family in FAMILIES.items() if family.translates and not family.uses_ctc}
"""Families of an encoder and a decoder, trained on pairs."""
WORD_INIT = {name: family for name, family in TEXT_FAMILIES.items() if "word_init" in family.config.model_fields}
"""Text families whose embeddings can begin as co-occurrence vectors."""
COMPLETING = {name: family for name, family in FAMILIES.items() if "completion" in family.objectives}
"""Causal families that are also trained on pairs."""
OBJECTIVES: list[str] = list(typing.get_args(ObjectiveConfig.model_fields["name"].annotation))
TEXT_OBJECTIVES = [name for name in OBJECTIVES if not NEEDS[name].reads_pairs]
TRAINED_WITH = {
    **{FAMILIES[name].default_objective: name for name in [*STACKED, "transformer", "ctc-encoder"]},
    "completion": "gpt2",
}
"""One family for each objective, by the name of the objective."""


def model_section(family: str, **sizes: Any) -> dict[str, Any]:
    """Return a recipe's `model` section of a family, without those of the sizes that it has no key for."""
    return {
        "family": family,
        **{key: size for key, size in sizes.items() if key in FAMILIES[family].config.model_fields},
    }
