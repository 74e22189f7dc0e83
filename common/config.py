"""Base classes of recipe sections and JSON records, and what a change of each recipe key has an effect on.

Every field declares the effects of a change in its annotation, once:

    seq_len: Annotated[int, ORDER | MEMORY] = Field(default=128, ge=8)

A field that holds a section may declare them for all keys of the section. Hashes, refusals of a change and comparisons
of recipes derive from these declarations.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Flag, auto
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from multihop.common.errors import UserError

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""The name of a file in a directory, without separators."""


class Section(BaseModel):
    """Base of a recipe's sections: refuses unknown keys, NaN and infinity, and is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, content: Any) -> Any:
        """Refuse true and false for a number: pydantic takes them for 1 and 0."""
        for key, value in content.items() if isinstance(content, dict) else ():
            items = value if isinstance(value, list | tuple) else [value]
            if key in cls.model_fields and (wrong := [item for item in items if isinstance(item, bool)]):
                types = set(_leaf_types(cls.model_fields[key].annotation))
                if types & {int, float} and bool not in types:
                    raise UserError(f"{key}={str(wrong[0]).lower()} is not a number; write a number")
        return content


def _leaf_types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation of unions, lists, tuples and `Annotated`."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        parts = parts[:1]
    if not parts:
        yield annotation
    for part in parts:
        yield from _leaf_types(part)


class Record(BaseModel):
    """Base of records in JSON files that we write: refuses unknown keys, converts no value, and is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Effect(Flag):
    """Lists what a change of a key's value may have an effect on."""

    DATA = auto()
    """The prepared data set."""
    ORDER = auto()
    """The samples that a step uses, and what the model sees of them."""
    COMPATIBILITY = auto()
    """The shape of the weights and their meaning: cannot change under a run."""
    UPDATES = auto()
    """The trained weights, by more than rounding."""
    LOCATION = auto()
    """The location of the run and its checkpoints."""
    MEMORY = auto()
    """The number of samples that fit into memory."""
    SPEED = auto()
    """Speed and memory, and the weights by rounding at most."""
    FINE_TUNING = auto()
    """The result of a trial with fine-tuning."""
    ZERO_SHOT = auto()
    """The result of a trial without training."""
    LOGGING = auto()
    """Anything that is only logged, displayed or kept."""


DATA, ORDER, COMPATIBILITY, UPDATES, LOCATION = (
    Effect.DATA,
    Effect.ORDER,
    Effect.COMPATIBILITY,
    Effect.UPDATES,
    Effect.LOCATION,
)
MEMORY, SPEED, LOGGING = Effect.MEMORY, Effect.SPEED, Effect.LOGGING
FINE_TUNING, ZERO_SHOT = Effect.FINE_TUNING, Effect.ZERO_SHOT


@cache
def effects_by_key(section: type[BaseModel]) -> dict[str, Effect]:
    """Return the declared effects of each key of a section: "phases[].seq_len" -> ORDER | MEMORY, for instance.

    Raises:
        TypeError: neither a field nor a field that holds its section declares effects, or the classes of a section
            declare different ones.
    """
    effects: dict[str, Effect] = {}
    for key, effect in _walk(section, "", None):
        if effects.setdefault(key, effect) != effect:
            raise TypeError(f"{key} affects {effects[key]} in one class of its section and {effect} in another")
    return effects


def effect_of(section: type[BaseModel], key: str) -> Effect:
    """Return the effects of a key, with or without list indexes; for a section, those of all its keys.

    Raises:
        KeyError: no such key exists.
    """
    pattern = re.sub(r"\[\d+\]", "[]", key)
    effects = [
        effect
        for declared, effect in effects_by_key(section).items()
        if declared == pattern or _is_below(declared, pattern) or _is_below(pattern, declared)
    ]
    if not effects:
        raise KeyError(key)
    return reduce(or_, effects)


def key_path(location: Sequence[int | str]) -> str:
    """Return the key at one of pydantic's locations: `phases[0].lr` for ("phases", 0, "lr")."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def mistakes_in(error: ValidationError) -> list[ErrorDetails]:
    """Return the mistakes in an input, without defaults that could not be derived from a field because of another
    mistake."""
    return [each for each in error.errors() if each["type"] != "default_factory_not_called"]


def select_by_effect(section: BaseModel, effects: Effect) -> dict[str, Any]:
    """Select the keys that have any of these effects, as plain JSON values; sections without any are left out."""
    selected: dict[str, Any] = _select(section, effects, None)
    return selected


def _is_below(key: str, other: str) -> bool:
    """Return whether `key` is inside of `other`: in a section, or in a dict that is passed on as it is."""
    return key.startswith((f"{other}.", f"{other}["))


def _walk(section: type[BaseModel], prefix: str, inherited: Effect | None) -> Iterator[tuple[str, Effect]]:
    for name, field in section.model_fields.items():
        declared, path = _declared(field) or inherited, f"{prefix}{name}"
        kinds, is_list = sections_in(field.annotation)
        if kinds:
            for kind in kinds:
                yield from _walk(kind, f"{path}[]." if is_list else f"{path}.", declared)
            if declared is not None and not all(_is_section(each) for each in _leaf_types(field.annotation)):
                yield path, declared  # it may also be a plain value
        elif declared is None:
            raise TypeError(f"{section.__name__}.{name} does not declare its effects")
        else:
            yield path, declared


def _declared(field: FieldInfo) -> Effect | None:
    effects = [each for each in field.metadata if isinstance(each, Effect)]
    assert len(effects) <= 1, field
    return effects[0] if effects else None


def sections_in(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the classes of the section that a field holds, several if one of its keys chooses among them, and whether
    the field holds a list of sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    inner = [sections_in(each) for each in get_args(annotation)]
    is_list = getattr(annotation, "__origin__", None) is list or any(each for _, each in inner)
    return [kind for kinds, _ in inner for kind in kinds], is_list


def _is_section(annotation: Any) -> bool:
    return annotation is type(None) or (isinstance(annotation, type) and issubclass(annotation, BaseModel))


@cache
def _fields(section: type[BaseModel]) -> list[tuple[str, Effect | None, list[type[BaseModel]]]]:
    """Return the name of each field, the effects that it declares, and the sections that it may hold."""
    return [(name, _declared(field), sections_in(field.annotation)[0]) for name, field in section.model_fields.items()]


def _select(value: Any, effects: Effect, inherited: Effect | None) -> Any:
    if isinstance(value, BaseModel):
        selected, dumped = {}, value.model_dump(mode="json")
        for name, declared, kinds in _fields(type(value)):
            declared, inner = declared or inherited, getattr(value, name)
            if kinds and isinstance(inner, BaseModel | list):
                below = _select(inner, effects, declared)
                if below or (inner == [] and any(each & effects for _, each in _walk(kinds[0], "", declared))):
                    selected[name] = below
            elif declared is not None and declared & effects and name in dumped:  # a field may be left out
                selected[name] = dumped[name]
        return selected
    if isinstance(value, list):
        items = [_select(each, effects, inherited) for each in value]
        return items if any(items) else []
    raise AssertionError(value)
