"""The families and objectives that tests go through."""

import typing

from pretrain.config import ObjectiveConfig
from pretrain.models.families import FAMILIES

LANGUAGE_MODELS = [name for name, family in FAMILIES.items() if not family.translates]
"""Families that are trained on texts."""
OBJECTIVES: list[str] = list(typing.get_args(ObjectiveConfig.model_fields["name"].annotation))
TEXT_OBJECTIVES = [name for name in OBJECTIVES if name != "translation"]
TRAINED_WITH = {FAMILIES[name].default_objective: name for name in [*LANGUAGE_MODELS, "transformer"]}
"""A family by the objective that it is trained with."""
