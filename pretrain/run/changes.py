"""Recipe changes when a run is resumed: keys that may change, and keys whose change the user has to allow by name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from multihop.common.config import COMPATIBILITY, DATA, LOCATION, ORDER, UPDATES, Section, effect_of, select_by_effect
from multihop.common.errors import UserError
from multihop.common.json_lines import read_rows
from multihop.pretrain.config import TrainingConfig

CHANGES = "changes.jsonl"
"""File in a run's folder with a row for each change that was allowed by name."""
Difference = tuple[str, Any, Any]
"""A dotted key with its previous and its current value; None where the key is absent."""

_LOCKED = DATA | ORDER | COMPATIBILITY | UPDATES | LOCATION
"""Effects of keys that may change only if the user allows it."""
_RECORDED = ORDER | COMPATIBILITY | UPDATES
"""Effects of keys that a checkpoint records. It identifies the data by its fingerprint."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of dicts and lists with dotted keys: {"phases[0].seq_len": 128, …}; a list of plain values is a leaf."""
    if isinstance(tree, dict) and tree:
        items = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(value, dict | list) for value in tree):
        items = [(f"{prefix}[{number}]", value) for number, value in enumerate(tree)]
    else:
        return {prefix: tree}
    return {key: leaf for path, value in items for key, leaf in flatten(value, path).items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """The dotted keys whose values differ between two resolved recipes, with both values."""
    first, second = flatten(one), flatten(other)
    keys = [*first, *(key for key in second if key not in first)]
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def locked_changes(then: dict[str, Any], now: dict[str, Any], section: type[Section]) -> list[Difference]:
    """The differences between two dumps of `section` in keys that need the user's permission or cannot change."""
    return [entry for entry in differences(then, now) if effect_of(section, entry[0]) & _LOCKED]


def check_allowed(changed: list[Difference], section: type[Section], allowed: Iterable[str], where: str) -> None:
    """Refuse changes that the user has not allowed by name, or that cannot be allowed.

    Args:
        changed: The locked changes between the recipe of a run and the one to resume it with.
        allowed: Dotted keys; a section's key allows all keys in it.
        where: The run, for messages.

    Raises:
        UserError: Some changes are not allowed.
    """
    allowed = tuple(allowed)
    fixed = [entry for entry in changed if effect_of(section, entry[0]) & COMPATIBILITY]
    if fixed:
        raise UserError(f"{where} was started with another recipe ({format_diff(fixed)}); set name=… for a new run")
    if other_moments := [entry for entry in changed if entry[0] == "optimizer.name" and "muon" in entry[1:]]:
        raise UserError(
            f"{where} was started with another optimizer ({format_diff(other_moments)}), whose moments are others; to "
            "continue from its weights, set name=… for a new run, and model.init_from to this one"
        )
    refused = [entry for entry in changed if not _is_within(entry[0], allowed)]
    if refused:
        options = " ".join(f"--allow-change '{key}'" for key, _, _ in refused[:3])
        raise UserError(
            f"{where} was started with another recipe ({format_diff(refused)}); set name=… for a new run, or, to "
            f"resume with the changed recipe, add {options}"
        )


def format_diff(changed: list[Difference], most: int = 5) -> str:
    """Format at most `most` differences as part of a sentence."""
    parts = [f"{key} was {json.dumps(then)}, is {json.dumps(now)}" for key, then, now in changed[:most]]
    more = len(changed) - most
    return "; ".join(parts) + (f" and {more} more" if more > 0 else "")


def allowed_in(run_dir: Path) -> set[str]:
    """The keys that the user has allowed to change since the run was started."""
    return {row["key"] for row in read_rows(run_dir / CHANGES)}


def recorded_part(config: TrainingConfig) -> dict[str, Any]:
    """The part of the recipe that a checkpoint records: keys that affect order, updates or compatibility."""
    return select_by_effect(config, _RECORDED)


def fill_recorded_part(recorded: dict[str, Any]) -> dict[str, Any]:
    """The part of the recipe that an older version recorded in a checkpoint, with defaults for newer keys.

    Raises:
        UserError: It has unknown keys or values.
    """
    data = {"data": recorded["data"]} if "data" in recorded else {}
    try:
        config = TrainingConfig.model_validate({**recorded, "data": None})
    except ValidationError as error:
        raise unreadable_recipe(error) from None
    return recorded_part(config) | data


def unreadable_recipe(error: ValidationError) -> UserError:
    """What to say of a checkpoint whose recipe has keys or values that this version does not have."""
    first = error.errors()[0]
    key, reason = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
    return UserError(
        f"the checkpoint records a recipe that this version cannot read ({key}: {reason}); use the version that wrote "
        "it"
    )


def _is_within(key: str, parts: Iterable[str]) -> bool:
    return any(key == part or key.startswith((f"{part}.", f"{part}[")) for part in parts)
