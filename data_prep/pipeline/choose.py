"""Chooses the documents to use: without copies, near duplicates and evaluation texts.

Each function takes splits of documents and returns splits with more rows dropped, the stages' outputs, which a later
start reuses, and the counts for the manifest.
"""

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from multihop.common.files import sha256_file
from multihop.data_prep.config import DataConfig, DecontaminateConfig, NearDuplicatesConfig
from multihop.data_prep.duplicates.copies import (
    FindCopies,
    SortHashes,
    find_copies,
    hash_ranges,
    rows_by_split,
    sort_hashes,
)
from multihop.data_prep.duplicates.decontaminate import (
    RULES,
    DecontaminateSplit,
    EvaluationNgrams,
    FindCommon,
    FindOverlaps,
    contaminated_rows,
    decontaminate_split,
    evaluation_ngrams,
    evaluation_sets,
    find_common,
    find_overlaps,
)
from multihop.data_prep.duplicates.near import (
    CandidatePairs,
    FindClusters,
    candidate_pairs,
    divide,
    dropped_rows,
    find_clusters,
)
from multihop.data_prep.duplicates.signed_splits import SignSplit, bands_of, sign_split
from multihop.data_prep.rules import clean
from multihop.data_prep.stages.documents import Kept
from multihop.data_prep.stages.outputs import AtHand, Output, stage_key

FRAGMENTS = "pieces of contaminated ones, kept"
RunOnce = Callable[[str, Callable[[Any], Output], Sequence[Any]], list[Output]]
"""Runs a stage on items, anywhere, and returns the outputs in the items' order: (stage's name, function, items)."""


@dataclass(frozen=True)
class Stages:
    """How stages are run, and how their outputs are read by the caller."""

    run_once: RunOnce
    at_hand: AtHand


Counts = dict[str, dict[str, int]]
Chosen = tuple[list[Kept], list[Output], Counts]


def choose(work: Path, read: list[Output], data: DataConfig, stages: Stages) -> Chosen:
    """Choose the documents of each split by all rules that the recipe sets.

    The fragments that decontamination leaves of a split's documents are a split of their own, right after it.
    Duplicates are removed before decontamination, because n-grams of many documents count as common phrases, and again
    after documents were cut, because fragments may be duplicates. No later stage creates documents.

    Raises UserError for evaluation texts that cannot be read.
    """
    splits = [Kept(output.path, output.sha256, _documents_in(output), np.empty(0, np.int64)) for output in read]
    splits, outputs, counts = without_duplicates(work, splits, data, stages)
    if data.decontaminate is not None:
        splits, more, told = decontaminated(work, splits, data, data.decontaminate, stages)
        outputs, counts = outputs + more, counts | told
        if told["decontaminate"].get(FRAGMENTS):
            splits, more, told = without_duplicates(work, splits, data, stages)
            outputs, counts = outputs + more, counts | {f"{stage} after cutting": of for stage, of in told.items()}
    return splits, outputs, counts


def without_duplicates(work: Path, splits: list[Kept], data: DataConfig, stages: Stages) -> Chosen:
    """Keep one of several equal documents and, if the recipe says so, one of several near duplicates."""
    splits, outputs, counts = without_copies(work, splits, stages)
    if data.near_duplicates is not None:
        splits, more, told = without_near_duplicates(work, splits, data.near_duplicates, stages)
        outputs, counts = outputs + more, counts | told
    return splits, outputs, counts


def without_copies(work: Path, splits: list[Kept], stages: Stages) -> Chosen:
    """Keep only the first of equal documents, in the order of the input."""
    to_sort = [
        SortHashes(stage_key("sort", [], "by size", kept_key(split)), str(work / "sort"), split) for split in splits
    ]
    runs = stages.run_once("sort", sort_hashes, to_sort)
    hashes = [run.sha256 for run in runs]
    paths = tuple(run.path for run in runs)
    ranges = hash_ranges(sum(run.facts["documents"] for run in runs))
    items = [
        FindCopies(stage_key("copies", [], hashes, low, high), str(work / "copies"), paths, low, high)
        for low, high in ranges
    ]
    copies = stages.run_once("copies", find_copies, items)
    with ExitStack() as stack:
        found = [str(stack.enter_context(stages.at_hand(output))) for output in copies]
        dropped = rows_by_split(found, len(splits))
    left = [_without(split, rows) for split, rows in zip(splits, dropped, strict=True)]
    return left, [*runs, *copies], {"copies": {"kept": _documents(left), "copy of another": sum(map(len, dropped))}}


def without_near_duplicates(work: Path, splits: list[Kept], config: NearDuplicatesConfig, stages: Stages) -> Chosen:
    """Keep only the longest document of each cluster of near duplicates."""
    folder, told = str(work / "near"), config.model_dump()
    to_sign = [
        SignSplit(stage_key("sign", ["numpy"], kept_key(split), told), folder, split.path, split.dropped, config)
        for split in splits
    ]
    signed = stages.run_once("sign", sign_split, to_sign)
    paths, hashes = [output.path for output in signed], [output.sha256 for output in signed]
    tasks = divide(sum(output.facts["documents"] for output in signed), bands_of(config))
    to_compare = [
        CandidatePairs(stage_key("pairs", ["numpy"], hashes, told, *task), folder, paths, *task, config.threshold)
        for task in tasks
    ]
    pairs = stages.run_once("compare", candidate_pairs, to_compare)
    key = stage_key("clusters", ["numpy"], hashes, [output.sha256 for output in pairs])
    (clusters,) = stages.run_once(
        "cluster", find_clusters, [FindClusters(key, folder, paths, [output.path for output in pairs])]
    )
    with stages.at_hand(clusters) as path:
        dropped = dropped_rows(str(path), len(splits))
    left = [_without(split, rows) for split, rows in zip(splits, dropped, strict=True)]
    counts = {"kept": _documents(left), "near duplicate of another": clusters.facts["dropped"]}
    return left, [*signed, *pairs, clusters], {"near duplicates": counts}


def decontaminated(
    work: Path, splits: list[Kept], data: DataConfig, config: DecontaminateConfig, stages: Stages
) -> Chosen:
    """Drop documents that contain evaluation texts, or cut them."""
    folder, sets, edits = str(work / "decontaminate"), evaluation_sets(config), data.filters.c4
    told = [RULES, {name: sha256_file(path) for name, path in sets.items()}, config.model_dump(exclude={"against"})]
    cleaning = [unicodedata.unidata_version, data.clean.model_dump(), clean.depends_on(data.clean)]
    table_key = stage_key("evaluation texts", ["numpy"], told, cleaning, None if edits is None else edits.model_dump())
    table_item = EvaluationNgrams(table_key, folder, sets, config, data.clean, edits)
    (table,) = stages.run_once("evaluation texts", evaluation_ngrams, [table_item])
    to_search = [
        FindOverlaps(
            stage_key("overlaps", ["numpy"], kept_key(split), table.sha256),
            folder,
            split.path,
            split.dropped,
            table.path,
        )
        for split in splits
    ]
    overlaps = stages.run_once("search", find_overlaps, to_search)
    paths, hashes = [output.path for output in overlaps], [output.sha256 for output in overlaps]
    common_key = stage_key("common", ["numpy"], hashes, config.common)
    (common,) = stages.run_once("common", find_common, [FindCommon(common_key, folder, paths, config.common)])
    to_cut = [
        DecontaminateSplit(
            stage_key("cut", ["numpy"], split.sha256, found.sha256, common.sha256, table.sha256, told),
            folder,
            split.path,
            found.path,
            common.path,
            table.path,
            list(sets),
            config.action,
        )
        for split, found in zip(splits, overlaps, strict=True)
    ]
    cut = stages.run_once("decontaminate", decontaminate_split, to_cut)

    def left() -> Iterator[Kept]:
        for split, found, output in zip(splits, overlaps, cut, strict=True):
            with stages.at_hand(found) as overlaps_path, stages.at_hand(common) as common_path:
                rows = contaminated_rows(str(overlaps_path), str(common_path))
            yield _without(split, rows)
            if output.facts["pieces"]:
                yield Kept(output.path, output.sha256, output.facts["pieces"], np.empty(0, np.int64))

    kept = list(left())
    counts = Counter({"kept": _documents(kept), "contaminated": sum(output.facts["documents"] for output in cut)})
    if config.action == "cut":
        counts[FRAGMENTS] = sum(output.facts["pieces"] for output in cut)
    for output in cut:
        counts.update({f"contaminated by {name}": number for name, number in output.facts["sets"].items()})
    return kept, [table, *overlaps, common, *cut], {"decontaminate": dict(counts)}


def kept_key(split: Kept) -> list[str]:
    """What identifies a split's documents in a key."""
    rows = np.ascontiguousarray(split.dropped, dtype="<i8")
    return [split.sha256, hashlib.sha256(rows.tobytes()).hexdigest()]


def _without(split: Kept, rows: np.ndarray) -> Kept:
    return replace(split, documents=split.documents - len(rows), dropped=np.union1d(split.dropped, rows))


def _documents_in(read: Output) -> int:
    documents: int = sum(part["documents"] for part in read.facts["parts"])
    return documents


def _documents(splits: list[Kept]) -> int:
    return sum(split.documents for split in splits)
