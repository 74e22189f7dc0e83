"""The model families, one per folder next to this file, and the recipe's `model` section as their union.

A family is found by the `FAMILY` in the config.py of its folder. Nothing in this file imports torch.
"""

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Field, TypeAdapter

import multihop.pretrain.models
from multihop.common.errors import UserError
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.models.family import Family

_SHARED = ("layers", "cpu", "gpu")


def family_module(family: str, name: str) -> ModuleType:
    """The module pretrain/models/FAMILY/NAME.py; hyphens in a family's name are underscores in its folder's."""
    return import_module(f"multihop.pretrain.models.{family.replace('-', '_')}.{name}")


def _load_family(name: str) -> Family:
    family = getattr(family_module(name, "config"), "FAMILY", None)
    if not isinstance(family, Family):
        raise TypeError(
            f"pretrain/models/{name}/config.py declares no FAMILY = Family(...); add it, as described in "
            "pretrain/models/family.py"
        )
    return family


FAMILIES: dict[str, Family] = {
    name: _load_family(name)
    for module in pkgutil.iter_modules(multihop.pretrain.models.__path__)
    if module.ispkg and (name := module.name.replace("_", "-")) not in _SHARED
}
"""The families by the value of `model.family`, in alphabetical order."""

PRESETS: dict[str, dict[str, Any]] = {
    preset: {"family": name, **sizes} for name, family in FAMILIES.items() for preset, sizes in family.presets.items()
}
"""The published sizes of all families, by the value of `model.preset`."""
assert len(PRESETS) == sum(len(family.presets) for family in FAMILIES.values()), "two presets have the same name"


def families_with(key: str) -> str:
    """The names of the families whose `model` section has a key, for messages: "bert or roberta"."""
    return " or ".join(name for name, family in FAMILIES.items() if key in family.config.model_fields)


def family_of_original_checkpoint(folder: Path) -> str | None:
    """The family whose authors published weights in the layout of a directory; None: there is none."""
    files = {name: family.original_checkpoint_file for name, family in FAMILIES.items()}
    return next((name for name, file in files.items() if file is not None and (folder / file).exists()), None)


def _fill_preset(content: Any) -> Any:
    """Fill in the keys of the preset, and drop keys of other families that are null.

    Raises:
        UserError: The preset or family is unknown, or a key of other families is set.
    """
    if not isinstance(content, dict):
        return content
    preset = content.get("preset")
    if preset is not None and str(preset) not in PRESETS:
        raise UserError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
    filled = {**(PRESETS[preset] if preset else {}), **content}
    name = filled.get("family")
    if name is None:
        raise UserError(f"family is missing; set one of {', '.join(FAMILIES)}, or a preset")
    if str(name) not in FAMILIES:
        raise UserError(f"unknown family {name!r}; known are {', '.join(FAMILIES)}")
    family = FAMILIES[str(name)]
    foreign = [key for key in filled if key not in family.config.model_fields and families_with(key)]
    for key in foreign:
        # An override can unset a key of the recipe that it changes to another family, but not remove it.
        if (value := filled.pop(key)) is not None:
            raise UserError(f"{key}={value}: family={name} has no {key}; remove it, or set family={families_with(key)}")
    return filled


if TYPE_CHECKING:
    AnyModelConfig = ModelConfig
else:
    AnyModelConfig = Annotated[
        Union[tuple(family.config for family in FAMILIES.values())],  # noqa: UP007
        Field(discriminator="family"),
        BeforeValidator(_fill_preset),
    ]
    """The recipe's `model` section: the class of the family that `family` or the preset names."""


def parse_model_config(content: dict[str, Any]) -> ModelConfig:
    """The `model` section of a recipe.

    Raises:
        pydantic.ValidationError: A key is unknown, has the wrong type, or does not fit the others.
    """
    config: ModelConfig = _model_adapter().validate_python(content)
    return config


@cache
def _model_adapter() -> TypeAdapter[ModelConfig]:
    return TypeAdapter(AnyModelConfig)  # whose schemas take a hundred times as long as a validation
