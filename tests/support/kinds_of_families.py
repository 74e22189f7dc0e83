"""The families by what they are trained on."""

from pretrain.models.families import FAMILIES

TEXT_FAMILIES = {name: family for name, family in FAMILIES.items() if not family.translates}
"""An encoder or a decoder alone."""
TRANSLATING = {name: family for name, family in FAMILIES.items() if family.translates}
"""An encoder and a decoder, trained on pairs."""
