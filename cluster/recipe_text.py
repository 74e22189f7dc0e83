"""The text of a recipe: plain YAML in one file, and overrides from the command line.

Nothing in it refers to anything else. Anchors, aliases and tags are refused, which is what bombs are made of; there is
no interpolation, for a recipe from somebody else would read this machine's environment by it.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from data_prep.given_file import MOST_BYTES, read_given_text
from data_prep.shown import redacted, shown

_DEEPEST = 32
_MOST_VALUES = 50_000
_LONGEST_NUMBER = 40
"""Characters: YAML's numbers in base 60 take time that grows with the square of their length."""
_TAG = "tag:yaml.org,2002:"
_KEY = re.compile(r"[\w-]+(\[\d+\])*(\.[\w-]+(\[\d+\])*)*")
# libyaml's is much faster; PyYAML may have been built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_tree(path: Path, overrides: list[str]) -> dict[str, Any]:
    """What a recipe's file says, with the overrides in it: dicts with text as keys, lists, text, numbers, bools, None.

    Args:
        overrides: KEY.PATH=VALUE; a list's items by index (`phases[0].seq_len=512`); VALUE is YAML, and a mapping adds
            to what mapping stands there.

    Raises:
        ValueError: one sentence.
    """
    tree = parse_yaml(read_given_text(path, str(path), "a recipe"), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}, expected the sections of a recipe")
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not _KEY.fullmatch(key) or len(steps := re.findall(r"[\w-]+", key)) > _DEEPEST:
            raise ValueError(
                f"{shown(override[:200])!r} is not an override; write KEY.PATH=VALUE, for instance model.layers=3"
            )
        _put(tree, steps, parse_yaml(text, key), key)
    return tree


def parse_yaml(text: str, origin: str) -> Any:
    """The value that YAML spells.

    Raises:
        ValueError: it is none, or what a recipe has no use for: anchors and aliases, tags, keys that are no text or
            stand there twice, depths of more than 32, more than MOST_BYTES.
    """
    try:
        if len(text) > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} characters")
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
        raise ValueError(f"{origin} is not valid YAML for a recipe: {' '.join(redacted(str(error)).split())}") from None


def check_texts(tree: Any, origin: str, key: str = "") -> None:
    """Refuse what must not stand in a recipe, wherever it stands: interpolation, and credentials.

    Raises:
        ValueError: naming the key, and never what is secret.
    """
    if isinstance(tree, dict | list):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(name, str):
                check_texts(name, origin, f"a key in {key or 'it'}")
            check_texts(value, origin, f"{key}[{name}]" if isinstance(name, int) else f"{key}.{name}".lstrip("."))
    if not isinstance(tree, str):
        return
    if "${" in tree:
        raise ValueError(
            f'{origin}: {key} holds "${{", and nothing is filled in in recipes; write what is meant, and give secrets '
            "by the environment to the libraries that need them (docs/security.md)"
        )
    if tree == "???":
        raise ValueError(f"{origin}: {key}=??? is not filled in; write a value")
    if redacted(tree) != tree:
        raise ValueError(
            f"{origin}: {key} is a URL with a password or key in it, which would reach files and MLflow; take it out "
            "and give it by MLFLOW_TRACKING_URI or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, for https:// "
            "texts by ~/.netrc, for s3:// by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (docs/security.md)"
        )


def _check_events(text: str) -> None:
    """Before anything is built: what makes it large or deep."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        line = event.start_mark.line + 1
        if number > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        if getattr(event, "anchor", None) is not None:
            raise ValueError(
                f"line {line} has an anchor or alias (& or *); write out what is meant, or put it in quotes"
            )
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"line {line} has a tag (!); write the value without it, or put it in quotes")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise ValueError(f"line {line} is nested more than {_DEEPEST} deep")


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
            raise ValueError(f"line {node.start_mark.line + 1} has a number of {len(node.value):,} characters")
        return
    keys = set()
    for key, value in node.value:
        _check_node(key)
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != f"{_TAG}str":
            raise ValueError(f"line {line} has a key that is not text; name it, or put it in quotes")
        if key.value in keys:
            raise ValueError(f"line {line} has the key {shown(key.value[:100])} a second time; remove one of them")
        keys.add(key.value)
        _check_node(value)


def _put(tree: Any, steps: list[str], value: Any, key: str) -> None:
    """`value` at the end of `steps`; sections that are not there yet are made."""
    step: Any = steps[0]
    if isinstance(tree, list):
        if not step.isdigit() or int(step) >= len(tree):
            raise ValueError(f"{key} cannot be applied: there is no item {step}, the list has {len(tree)}")
        step = int(step)
        there = tree[step]
    else:
        there = tree.get(step)
    if len(steps) == 1:
        tree[step] = _merged(there, value)
        return
    if not isinstance(there, dict | list):
        there = tree[step] = {}
    _put(there, steps[1:], value, key)


def _merged(there: Any, value: Any) -> Any:
    if not isinstance(there, dict) or not isinstance(value, dict):
        return value
    return there | {key: _merged(there.get(key), item) for key, item in value.items()}
