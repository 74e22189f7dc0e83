"""The families and objectives by what they are trained on."""

import typing
from typing import Any

from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.objectives.config import ObjectiveConfig

TEXT_FAMILIES = {
    name: family
    for name, family in FAMILIES.items()
    if not family.translates and ("heads" in family.config.model_fields or family.causal)
}
"""Families that are an encoder or a decoder alone, with attention or causal."""
AT_HUGGING_FACE = {name: family for name, family in TEXT_FAMILIES.items() if family.auto_class is not None}
"""Text families that a class of transformers loads."""
RELATIVE = {name: family for name, family in TEXT_FAMILIES.items() if "max_distance" in family.config.model_fields}
"""Text families that can have relative positions."""
TRANSLATING = {name: family for name, family in FAMILIES.items() if family.translates}
"""Families of an encoder and a decoder, trained on pairs."""
WORD_INIT = {name: family for name, family in TEXT_FAMILIES.items() if "word_init" in family.config.model_fields}
"""Text families whose embeddings can begin as co-occurrence vectors."""
OBJECTIVES: list[str] = list(typing.get_args(ObjectiveConfig.model_fields["name"].annotation))
TEXT_OBJECTIVES = [name for name in OBJECTIVES if name != "translation"]
TRAINED_WITH = {FAMILIES[name].default_objective: name for name in [*TEXT_FAMILIES, "transformer"]}
"""One family for each objective, by the name of the objective."""


def keys_of(family: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a `model` section that the family has."""
    return {key: value for key, value in sizes.items() if key in FAMILIES[family].config.model_fields}
