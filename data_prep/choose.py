"""Which of the documents that were read are used: copies of others are dropped."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.copies import FindCopies, SortHashes, find_copies, hash_ranges, rows_by_split, sort_hashes
from data_prep.documents import Kept
from data_prep.stages import Output, stage_key

RunOnce = Callable[[str, Callable[[Any], Output], Sequence[Any]], list[Output]]
"""Runs a stage on items, anywhere, and gives the outputs in the items' order: (stage's name, function, items)."""


def without_copies(work: Path, read: list[Output], run_once: RunOnce) -> tuple[list[Kept], list[Output]]:
    """The documents of each split that are not copies of an earlier one, and the outputs that stand for it."""
    to_sort = [SortHashes(stage_key("sort", [], output.sha256), str(work / "sort"), output.path) for output in read]
    runs = run_once("sort", sort_hashes, to_sort)
    hashes = [run.sha256 for run in runs]
    paths = tuple(run.path for run in runs)
    ranges = hash_ranges(sum(run.facts["documents"] for run in runs))
    items = [
        FindCopies(stage_key("copies", [], hashes, low, high), str(work / "copies"), paths, low, high)
        for low, high in ranges
    ]
    copies = run_once("copies", find_copies, items)
    dropped = rows_by_split([output.path for output in copies], len(read))
    kept = [
        Kept(output.path, output.sha256, run.facts["documents"] - len(rows), rows)
        for output, run, rows in zip(read, runs, dropped, strict=True)
    ]
    return kept, [*runs, *copies]


def kept_key(split: Kept) -> list[str]:
    """What a key must say of a split's documents."""
    rows = np.ascontiguousarray(split.dropped, dtype="<i8")
    return [split.sha256, hashlib.sha256(rows.tobytes()).hexdigest()]
