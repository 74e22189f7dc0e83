"""The text of a recipe: plain YAML in one file, and overrides from the command line.

A recipe refers to nothing outside of it. Anchors, aliases and tags are refused, because documents that expand without
bound are made of them. There is no interpolation: a recipe from another author could read the environment with it.
"""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from multihop.common.errors import UserError
from multihop.common.files import MAX_TEXT_BYTES, read_user_text
from multihop.common.redaction import redacted, safe_text

Override = tuple[str, Any]
"""KEY.PATH and the value that it gets."""

_DEEPEST = 32
_MOST_VALUES = 50_000
_LONGEST_NUMBER = 40
"""Characters. The time to parse a base-60 number of YAML 1.1 grows with the square of its length."""
_TAG = "tag:yaml.org,2002:"
_KEY = re.compile(r"[\w-]+(\[\d+\])*(\.[\w-]+(\[\d+\])*)*")
# libyaml's is much faster; PyYAML may have been built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_tree(path: Path, what: str) -> dict[str, Any]:
    """Read a YAML file of sections: dicts with string keys, lists, strings, numbers, bools, None.

    Args:
        what: the file is, for messages.

    Raises:
        UserError: one sentence.
    """
    tree = parse_yaml(read_user_text(path, str(path), what), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{path} holds a {type(tree).__name__}, expected the sections of {what}")
    return tree


def parse_override(text: str) -> Override:
    """Split KEY.PATH=VALUE, where VALUE is YAML.

    Raises:
        UserError: one sentence.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(_no_override(text))
    _steps(key, text)
    return key, parse_yaml(value, key)


def put(tree: dict[str, Any], override: Override) -> None:
    """Put an override's value into a recipe's tree.

    Args:
        override: a list's items by index (`phases[0].seq_len`); a mapping is merged into an existing mapping.

    Raises:
        UserError: one sentence.
    """
    key, value = override
    # Recipes that are made from one override share no list or section.
    _put(tree, _steps(key, key), deepcopy(value), key)


def parse_yaml(text: str, origin: str) -> Any:
    """Parse the subset of YAML that recipes use.

    Raises:
        UserError: it is not valid YAML, or it has anchors, aliases, tags, keys that are not strings, duplicate keys,
            more than 32 levels, or more than MAX_TEXT_BYTES.
    """
    try:
        if len(text) > MAX_TEXT_BYTES:
            raise UserError(f"it is longer than {MAX_TEXT_BYTES:,} characters")
        _check_events(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_node(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{origin} is not valid YAML for a recipe: {' '.join(redacted(str(error)).split())}") from None


def check_texts(tree: Any, origin: str, key: str = "") -> None:
    """Refuse interpolation and credentials in any text of a recipe.

    Raises:
        UserError: naming the key, without the secret.
    """
    if isinstance(tree, dict | list):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(name, str):
                check_texts(name, origin, f"a key in {key or 'it'}")
            check_texts(value, origin, f"{key}[{name}]" if isinstance(name, int) else f"{key}.{name}".lstrip("."))
    if not isinstance(tree, str):
        return
    if "${" in tree:
        raise UserError(
            f'{origin}: {key} contains "${{", but recipes have no interpolation; write the value, and pass '
            "secrets in the environment to the libraries that need them (docs/security.md)"
        )
    if tree == "???":
        raise UserError(f"{origin}: {key}=??? is a placeholder; write a value")
    if redacted(tree) != tree:
        raise UserError(
            f"{origin}: {key} is a URL with a password or key, which would be written to files and MLflow; remove "
            "it and set MLFLOW_TRACKING_URI or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, for https:// "
            "sources use ~/.netrc, for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (docs/security.md)"
        )


def _check_events(text: str) -> None:
    """Bound size and depth before anything is constructed."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        line = event.start_mark.line + 1
        if number > _MOST_VALUES:
            raise UserError(f"it has more than {_MOST_VALUES:,} values")
        if getattr(event, "anchor", None) is not None:
            raise UserError(f"line {line} has an anchor or alias (& or *); write the value out, or put it in quotes")
        if getattr(event, "tag", None) is not None:
            raise UserError(f"line {line} has a tag (!); write the value without it, or put it in quotes")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise UserError(f"line {line} is nested more than {_DEEPEST} deep")


def _check_node(node: Any) -> None:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_node(item)
        return
    if isinstance(node, yaml.ScalarNode):
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("int", "float", "bool", "null"):
            node.tag = f"{_TAG}str"  # dates too: no key of a recipe is one
        elif len(node.value) > _LONGEST_NUMBER:
            raise UserError(f"line {node.start_mark.line + 1} has a number of {len(node.value):,} characters")
        return
    keys = set()
    for key, value in node.value:
        _check_node(key)
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
            raise UserError(f"line {line} has a key that is not a string; put it in quotes")
        if key.value in keys:
            raise UserError(f"line {line} has the duplicate key {safe_text(key.value[:100])}; remove one")
        keys.add(key.value)
        _check_node(value)


def _steps(key: str, text: str) -> list[str]:
    steps = re.findall(r"[\w-]+", key)
    if not _KEY.fullmatch(key) or len(steps) > _DEEPEST:
        raise UserError(_no_override(text))
    return steps


def _no_override(text: str) -> str:
    return f"{safe_text(text[:200])!r} is not an override; write KEY.PATH=VALUE, for instance model.layers=3"


def _put(tree: Any, steps: list[str], value: Any, key: str) -> None:
    """Put `value` at the end of `steps`, creating sections on the way."""
    step: Any = steps[0]
    if isinstance(tree, list):
        if not step.isdigit() or int(step) >= len(tree):
            raise UserError(f"{key} cannot be applied: index {step} is out of range for a list of {len(tree)}")
        step = int(step)
        current = tree[step]
    else:
        current = tree.get(step)
    if len(steps) == 1:
        tree[step] = _merge(current, value)
        return
    if not isinstance(current, dict | list):
        current = tree[step] = {}
    _put(current, steps[1:], value, key)


def _merge(current: Any, value: Any) -> Any:
    if not isinstance(current, dict) or not isinstance(value, dict):
        return value
    return current | {key: _merge(current.get(key), item) for key, item in value.items()}
