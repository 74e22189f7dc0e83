"""What may change in the recipe of a run that has begun, and what a person has to allow by name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.rows import read_rows
from pretrain.config import TrainingConfig

CHANGES = "changes.jsonl"
"""In a run's folder: a row for each change that was allowed by name."""
Difference = tuple[str, Any, Any]
"""A dotted key, and its value then and now; null where there was or is none."""

_FREE = ("eval", "tracking", "cluster", "checkpoint", "engine")
"""Sections that decide neither the data nor what the weights become, but for rounding."""
_BINDING = ("engine.precision", "checkpoint.location")
"""Keys of free sections that do."""
_FIXED = ("name", "model", "tokenizer", "objective.name")
"""What cannot change: the weights would not fit, or would mean something else."""
_FIXED_BUT = ("model.dropout",)


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree of mappings and lists as dotted keys: {"phases[0].seq_len": 128, …}; a list of plain values is one."""
    if isinstance(tree, dict) and tree:
        items = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list) and any(isinstance(value, dict | list) for value in tree):
        items = [(f"{prefix}[{number}]", value) for number, value in enumerate(tree)]
    else:
        return {prefix: tree}
    return {key: leaf for path, value in items for key, leaf in flatten(value, path).items()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[Difference]:
    """Dotted keys whose values differ between two resolved recipes, with both values."""
    first, second = flatten(one), flatten(other)
    keys = [*first, *(key for key in second if key not in first)]
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def binding_differences(then: dict[str, Any], now: dict[str, Any]) -> list[Difference]:
    """The differences that do decide what the weights become."""
    return [entry for entry in differences(then, now) if _lies_in(entry[0], _BINDING) or not _lies_in(entry[0], _FREE)]


def check_allowed(changed: list[Difference], allowed: Iterable[str], where: str) -> None:
    """Refuse what is not allowed by name.

    Args:
        changed: binding differences between a run's recipe and the one it is to go on with.
        allowed: dotted keys; one of a section allows all in it.

    Raises:
        ValueError: naming the keys with both values, and what to do.
    """
    allowed = tuple(allowed)
    fixed = [entry for entry in changed if _lies_in(entry[0], _FIXED) and not _lies_in(entry[0], _FIXED_BUT)]
    if fixed:
        raise ValueError(f"{where} was begun with another recipe ({listed(fixed)}); set name=… for another run")
    refused = [entry for entry in changed if not _lies_in(entry[0], allowed)]
    if refused:
        options = " ".join(f"--allow-change '{key}'" for key, _, _ in refused[:3])
        raise ValueError(
            f"{where} was begun with another recipe ({listed(refused)}); set name=… for another run, or, to go on "
            f"with this one from here, add {options}"
        )


def listed(changed: list[Difference], most: int = 5) -> str:
    """Differences as a sentence's part."""
    shown = [f"{key} was {json.dumps(then)}, is {json.dumps(now)}" for key, then, now in changed[:most]]
    more = len(changed) - most
    return "; ".join(shown) + (f" and {more} more" if more > 0 else "")


def allowed_in(run_dir: Path) -> set[str]:
    """The keys whose changes were allowed since the run began."""
    return {row["key"] for row in read_rows(run_dir / CHANGES)}


def training_part(config: TrainingConfig) -> dict[str, Any]:
    """What a checkpoint remembers of the recipe: all keys whose change is a change of the run."""
    content = config.model_dump(mode="json", exclude={"name", "checkpoint", "data"})
    content["engine"] = {"precision": content["engine"]["precision"]}
    # Of the data only the weights are read; what it holds has a fingerprint of its own.
    sources = config.data.sources if config.data else []
    return content | {"data": {"sources": [{"weight": source.weight} for source in sources]}}


def completed(remembered: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint of an older version remembers, with the defaults of the keys that are new since.

    Raises:
        ValueError: it has keys or values that there are no more.
    """
    config = TrainingConfig.model_validate({key: part for key, part in remembered.items() if key != "data"})
    return training_part(config) | {"data": remembered["data"]}


def _lies_in(key: str, parts: Iterable[str]) -> bool:
    return any(key == part or key.startswith((f"{part}.", f"{part}[")) for part in parts)
