"""What recipes and JSON files are validated with, and what each key of a recipe decides.

Every field declares what it decides in its annotation, once:

    seq_len: Annotated[int, ORDER | MEMORY] = Field(default=128, ge=8)

A field that holds a section may declare for all that is in the section. Hashes, refusals of a change and comparisons of
recipes derive from these declarations.
"""

import re
from collections.abc import Iterator, Sequence
from enum import Flag, auto
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
PlainName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
"""Of a file in a directory, and in no other."""


class Section(BaseModel):
    """A part of a recipe: every key is known, every number finite (JSON has no others), and nothing changes after
    validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Record(BaseModel):
    """A part of a JSON file that we write: every key is known and no value is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Affects(Flag):
    """What changes with the value of a key."""

    DATA = auto()
    """The prepared data set."""
    ORDER = auto()
    """Which samples a step uses, and what the model sees of them."""
    COMPATIBILITY = auto()
    """Whether weights fit, and what they stand for: cannot change under a run."""
    UPDATES = auto()
    """What the weights become, by more than rounding."""
    LOCATION = auto()
    """Where the run and its checkpoints are."""
    MEMORY = auto()
    """How many samples fit into memory."""
    SPEED = auto()
    """Speed and memory, and the weights by rounding at most."""
    FINE_TUNING = auto()
    """The result of a trial that is fine-tuned."""
    ZERO_SHOT = auto()
    """The result of a trial without training."""
    LOGGING = auto()
    """What is shown or kept."""


DATA, ORDER, COMPATIBILITY, UPDATES, LOCATION = (
    Affects.DATA,
    Affects.ORDER,
    Affects.COMPATIBILITY,
    Affects.UPDATES,
    Affects.LOCATION,
)
MEMORY, SPEED, LOGGING = Affects.MEMORY, Affects.SPEED, Affects.LOGGING
FINE_TUNING, ZERO_SHOT = Affects.FINE_TUNING, Affects.ZERO_SHOT


@cache
def declarations(section: type[BaseModel]) -> dict[str, Affects]:
    """What each key of a section decides: "phases[].seq_len" -> ORDER | MEMORY, for instance.

    Raises:
        TypeError: a field declares nothing, and neither does a field that holds its section; or the classes of a
            section declare different things.
    """
    found: dict[str, Affects] = {}
    for key, decides in _walk(section, "", None):
        if found.setdefault(key, decides) != decides:
            raise TypeError(f"{key} decides {found[key]} in one class of its section and {decides} in another")
    return found


def decided_by(section: type[BaseModel], key: str) -> Affects:
    """What a key of a recipe, with or without list indexes, decides; of a whole section, all that its keys decide.

    Raises:
        KeyError: there is no such key.
    """
    pattern = re.sub(r"\[\d+\]", "[]", key)
    found = [
        decides
        for declared, decides in declarations(section).items()
        if declared == pattern or declared.startswith((f"{pattern}.", f"{pattern}[")) or _lies_below(pattern, declared)
    ]
    if not found:
        raise KeyError(key)
    return Affects(sum(each.value for each in set(_members(found))))


def key_path(location: Sequence[int | str]) -> str:
    """The key at a location of pydantic's: `phases[0].lr` for ("phases", 0, "lr")."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def part_deciding(section: BaseModel, what: Affects) -> dict[str, Any]:
    """The keys of a section that decide any of `what`, as plain JSON values; sections without any are left out."""
    part: dict[str, Any] = _part(section, what, None)
    return part


def _members(flags: list[Affects]) -> Iterator[Affects]:
    for each in flags:
        yield from each


def _lies_below(pattern: str, declared: str) -> bool:
    """A key inside of a value that is no section: a dict that is passed on as it is."""
    return pattern.startswith((f"{declared}.", f"{declared}["))


def _walk(section: type[BaseModel], prefix: str, inherited: Affects | None) -> Iterator[tuple[str, Affects]]:
    for name, field in section.model_fields.items():
        declared, path = _declared(field) or inherited, f"{prefix}{name}"
        kinds, is_list = sections_in(field.annotation)
        if kinds:
            for kind in kinds:
                yield from _walk(kind, f"{path}[]." if is_list else f"{path}.", declared)
        elif declared is None:
            raise TypeError(f"{section.__name__}.{name} does not declare what it decides")
        else:
            yield path, declared


def _declared(field: FieldInfo) -> Affects | None:
    found = [each for each in field.metadata if isinstance(each, Affects)]
    assert len(found) <= 1, field
    return found[0] if found else None


def sections_in(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The classes of the section that a field holds, several where a key of it chooses one, and whether it holds a list
    of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    inner = [sections_in(each) for each in get_args(annotation)]
    is_list = getattr(annotation, "__origin__", None) is list or any(each for _, each in inner)
    return [kind for kinds, _ in inner for kind in kinds], is_list


def _part(value: Any, what: Affects, inherited: Affects | None) -> Any:
    if isinstance(value, BaseModel):
        part = {}
        for name, field in type(value).model_fields.items():
            declared, inner = _declared(field) or inherited, getattr(value, name)
            kinds, _ = sections_in(field.annotation)
            if kinds and inner is not None:
                below = _part(inner, what, declared)
                if below or (inner == [] and any(each & what for _, each in _walk(kinds[0], "", declared))):
                    part[name] = below
            elif declared is not None and declared & what:
                part |= value.model_dump(mode="json", include={name})  # nothing, if the field is left out
        return part
    if isinstance(value, list):
        parts = [_part(each, what, inherited) for each in value]
        return parts if any(parts) else []
    raise AssertionError(value)
