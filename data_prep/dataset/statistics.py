"""Statistics of a prepared data set, from its manifest and shards: lengths, sources and token counts."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multihop.data_prep.dataset.manifest import Manifest, read_token_counts
from multihop.data_prep.dataset.shards import Documents, open_dataset

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SideStatistics:
    """Describes the source or the target sides of pairs."""

    tokens: int
    mean: float
    """Mean number of tokens of a side."""
    lengths: list[int]
    """Number of tokens of a side at QUANTILES."""


@dataclass(frozen=True)
class GroupStatistics:
    """Describes the documents or pairs of one split and source."""

    split: str
    source: int
    """Index into the manifest's sources."""
    documents: int
    sentences: int
    tokens: int
    lengths: list[int]
    """Number of tokens of a document at QUANTILES."""
    sides: dict[str, SideStatistics] | None = None
    """Statistics of the "source" and "target" sides of pairs; None for documents."""


@dataclass(frozen=True)
class Statistics:
    """Describes one data set."""

    manifest: Manifest
    groups: list[GroupStatistics]
    length_counts: dict[str, list[int]]
    """Number of documents with [2^k, 2^(k+1)) tokens, for k from 0, by split."""
    token_counts: np.ndarray
    """int64 (vocab_size,): number of occurrences of each id in the train shards; for pairs, on the target sides."""

    def ids_that_make_up(self, share: float) -> int:
        """Return the number of most frequent ids that make up this share of the train tokens."""
        cumulative = np.cumsum(np.sort(self.token_counts)[::-1])
        return int(np.searchsorted(cumulative, share * cumulative[-1])) + 1 if cumulative[-1] else 0


def compute_statistics(folder: Path) -> Statistics:
    """Read the lengths of all documents, but no tokens.

    Raises:
        UserError: the folder holds no data set, or a file is missing or truncated.
    """
    dataset = open_dataset(folder)
    manifest = dataset.manifest
    splits = {"train": dataset.train, "heldout": dataset.heldout}
    return Statistics(
        manifest=manifest,
        groups=[
            group
            for split, documents in splits.items()
            for source in range(len(manifest.sources))
            if (group := _group(split, source, documents.of_source(source)[1], manifest.pairs)) is not None
        ],
        length_counts={split: _by_powers_of_two(documents.lengths) for split, documents in splits.items()},
        token_counts=read_token_counts(folder, manifest),
    )


def _group(split: str, source: int, documents: Documents, pairs: bool) -> GroupStatistics | None:
    if not len(documents):
        return None
    lengths, sides = documents.lengths, None
    if pairs:
        sources = documents.source_lengths
        sides = {"source": _side(sources), "target": _side(lengths - sources)}
    return GroupStatistics(
        split,
        source,
        len(documents),
        documents.sentences,
        int(lengths.sum()),
        _quantiles(lengths),
        sides,
    )


def _side(lengths: np.ndarray) -> SideStatistics:
    return SideStatistics(int(lengths.sum()), float(lengths.mean()), _quantiles(lengths))


def _quantiles(lengths: np.ndarray) -> list[int]:
    return [int(length) for length in np.quantile(lengths, QUANTILES, method="nearest")]


def _by_powers_of_two(lengths: np.ndarray) -> list[int]:
    # Every document has a token. frexp gives 2^(k+1) > length >= 2^k as k + 1.
    return np.bincount(np.frexp(lengths)[1] - 1).tolist() if len(lengths) else []
