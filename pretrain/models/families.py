"""The model families: one for each folder beside this file, found by its declaration. Imports no torch."""

import pkgutil
from importlib import import_module
from typing import Any

import multihop.pretrain.models
from multihop.pretrain.models.family import Family

_SHARED = "common"


def _declared(name: str) -> Family:
    declaration = getattr(import_module(f"multihop.pretrain.models.{name}"), "FAMILY", None)
    if not isinstance(declaration, Family):
        raise TypeError(
            f"pretrain/models/{name}/__init__.py declares no FAMILY = Family(...); see pretrain/models/family.py"
        )
    return declaration


FAMILIES: dict[str, Family] = {
    module.name: _declared(module.name)
    for module in pkgutil.iter_modules(multihop.pretrain.models.__path__)
    if module.ispkg and module.name != _SHARED
}
"""By the value of `model.family`, in alphabetical order."""

PRESETS: dict[str, dict[str, Any]] = {
    preset: {"family": name, **sizes} for name, family in FAMILIES.items() for preset, sizes in family.presets.items()
}
"""The published sizes of all families, by the value of `model.preset`."""
assert len(PRESETS) == sum(len(family.presets) for family in FAMILIES.values()), "two presets have the same name"
