"""Selects the documents to use: without copies, near duplicates and evaluation texts.

Each function takes selections and returns selections with more rows dropped, the outputs of its stages, which a later
start reuses, and the counts for the manifest.
"""

import hashlib
import unicodedata
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from multihop.common.files import sha256_file, sha256_json
from multihop.data_prep.config import DataConfig, DecontaminateConfig, NearDuplicatesConfig
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
from multihop.data_prep.duplicates.exact import (
    FindCopies,
    SortHashes,
    find_copies,
    hash_ranges,
    rows_by_split,
    sort_hashes,
)
from multihop.data_prep.duplicates.near import (
    CandidatePairs,
    FindClusters,
    candidate_pairs,
    dropped_rows,
    find_clusters,
    plan_comparisons,
)
from multihop.data_prep.duplicates.signature_files import SignSplit, band_count, sign_split
from multihop.data_prep.rules import clean
from multihop.data_prep.stages.documents import Selection
from multihop.data_prep.stages.outputs import Output, stage_key
from multihop.data_prep.stages.runner import StageRunner

FRAGMENTS = "pieces of contaminated ones, kept"
Counts = dict[str, dict[str, int]]
SelectionResult = tuple[list[Selection], list[Output], Counts]


def select_documents(work: Path, read: list[Output], data: DataConfig, runner: StageRunner) -> SelectionResult:
    """Select the documents of each split by all rules that the recipe sets.

    The fragments that decontamination leaves of a split's documents are a split of their own, right after it.
    Duplicates are removed before decontamination, because n-grams of many documents count as common phrases, and again
    after documents were cut, because fragments may be duplicates. No later stage creates documents.

    Raises:
        UserError: evaluation texts cannot be read.
    """
    selections = [
        Selection(output.path, output.sha256, _documents_in(output), np.empty(0, np.int64)) for output in read
    ]
    selections, outputs, counts = drop_duplicates(work, selections, data, runner)
    if data.decontaminate is not None:
        selections, more, added = decontaminate(work, selections, data, data.decontaminate, runner)
        outputs, counts = outputs + more, counts | added
        if added["decontaminate"].get(FRAGMENTS):
            selections, more, added = drop_duplicates(work, selections, data, runner)
            outputs, counts = outputs + more, counts | {f"{stage} after cutting": of for stage, of in added.items()}
    return selections, outputs, counts


def drop_duplicates(work: Path, selections: list[Selection], data: DataConfig, runner: StageRunner) -> SelectionResult:
    """Keep one of several equal documents and, if the recipe says so, one of several near duplicates."""
    selections, outputs, counts = drop_copies(work, selections, runner)
    if data.near_duplicates is not None:
        selections, more, added = drop_near_duplicates(work, selections, data.near_duplicates, runner)
        outputs, counts = outputs + more, counts | added
    return selections, outputs, counts


def drop_copies(work: Path, selections: list[Selection], runner: StageRunner) -> SelectionResult:
    """Keep only the first of equal documents, in the order of the input."""
    to_sort = [
        SortHashes(stage_key("sort", [], "by size", selection_key(selection)), str(work / "sort"), selection)
        for selection in selections
    ]
    runs = runner.outputs("sort", sort_hashes, to_sort)
    hashes = sha256_json([run.sha256 for run in runs])  # once, not for each item
    paths = tuple(run.path for run in runs)
    items = [
        FindCopies(stage_key("copies", [], hashes, low, high), str(work / "copies"), paths, low, high)
        for low, high in hash_ranges(sum(run.metadata["documents"] for run in runs))
    ]
    copies = runner.outputs("copies", find_copies, items)
    with ExitStack() as stack:
        copy_paths = [str(stack.enter_context(runner.local_file(output))) for output in copies]
        dropped = rows_by_split(copy_paths, len(selections))
    kept = _drop_rows(selections, dropped)
    return kept, [*runs, *copies], {"copies": {"kept": _count(kept), "copy of another": sum(map(len, dropped))}}


def drop_near_duplicates(
    work: Path, selections: list[Selection], config: NearDuplicatesConfig, runner: StageRunner
) -> SelectionResult:
    """Keep only the longest document of each cluster of near duplicates."""
    folder, settings = str(work / "near"), config.model_dump()
    to_sign = [
        SignSplit(
            stage_key("sign", ["numpy"], selection_key(selection), settings),
            folder,
            selection.path,
            selection.dropped,
            config,
        )
        for selection in selections
    ]
    signatures = runner.outputs("sign", sign_split, to_sign)
    paths = [output.path for output in signatures]
    hashes = sha256_json([output.sha256 for output in signatures])  # once, not for each item
    tasks = plan_comparisons(sum(output.metadata["documents"] for output in signatures), band_count(config))
    to_compare = [
        CandidatePairs(stage_key("pairs", ["numpy"], hashes, settings, *task), folder, paths, *task, config.threshold)
        for task in tasks
    ]
    pairs = runner.outputs("compare", candidate_pairs, to_compare)
    key = stage_key("clusters", ["numpy"], hashes, [output.sha256 for output in pairs])
    (clusters,) = runner.outputs(
        "cluster", find_clusters, [FindClusters(key, folder, paths, [output.path for output in pairs])]
    )
    with runner.local_file(clusters) as path:
        kept = _drop_rows(selections, dropped_rows(str(path), len(selections)))
    counts = {"kept": _count(kept), "near duplicate of another": clusters.metadata["dropped"]}
    return kept, [*signatures, *pairs, clusters], {"near duplicates": counts}


def decontaminate(
    work: Path, selections: list[Selection], data: DataConfig, config: DecontaminateConfig, runner: StageRunner
) -> SelectionResult:
    """Drop documents that contain evaluation texts, or cut them."""
    folder, sets = str(work / "decontaminate"), evaluation_sets(config)
    rules = [RULES, {name: sha256_file(path) for name, path in sets.items()}, config.model_dump(exclude={"against"})]
    table = _evaluation_table(folder, sets, rules, data, config, runner)
    to_search = [
        FindOverlaps(
            stage_key("overlaps", ["numpy"], RULES, selection_key(selection), table.sha256),
            folder,
            selection.path,
            selection.dropped,
            table.path,
        )
        for selection in selections
    ]
    overlaps = runner.outputs("search", find_overlaps, to_search)
    paths, hashes = [output.path for output in overlaps], [output.sha256 for output in overlaps]
    common_key = stage_key("common", ["numpy"], RULES, hashes, config.common)
    (common,) = runner.outputs("common", find_common, [FindCommon(common_key, folder, paths, config.common)])
    to_cut = [
        DecontaminateSplit(
            stage_key("cut", ["numpy"], selection.sha256, overlap.sha256, common.sha256, table.sha256, rules),
            folder,
            selection.path,
            overlap.path,
            common.path,
            table.path,
            list(sets),
            config.action,
        )
        for selection, overlap in zip(selections, overlaps, strict=True)
    ]
    fragments = runner.outputs("decontaminate", decontaminate_split, to_cut)
    kept: list[Selection] = []
    for selection, overlap, output in zip(selections, overlaps, fragments, strict=True):
        with runner.local_file(overlap) as overlaps_path, runner.local_file(common) as common_path:
            kept += _drop_rows([selection], [contaminated_rows(str(overlaps_path), str(common_path))])
        if output.metadata["pieces"]:
            kept.append(Selection(output.path, output.sha256, output.metadata["pieces"], np.empty(0, np.int64)))
    counts = Counter({"kept": _count(kept), "contaminated": sum(output.metadata["documents"] for output in fragments)})
    if config.action == "cut":
        counts[FRAGMENTS] = sum(output.metadata["pieces"] for output in fragments)
    for output in fragments:
        counts.update({f"contaminated by {name}": number for name, number in output.metadata["sets"].items()})
    return kept, [table, *overlaps, common, *fragments], {"decontaminate": dict(counts)}


def _evaluation_table(
    folder: str,
    sets: dict[str, str],
    rules: list[Any],
    data: DataConfig,
    config: DecontaminateConfig,
    runner: StageRunner,
) -> Output:
    edits = data.filters.c4
    cleaning = [unicodedata.unidata_version, data.clean.model_dump(), clean.dependencies(data.clean)]
    key = stage_key("evaluation texts", ["numpy"], rules, cleaning, None if edits is None else edits.model_dump())
    item = EvaluationNgrams(key, folder, sets, config, data.clean, edits)
    (table,) = runner.outputs("evaluation texts", evaluation_ngrams, [item])
    return table


def selection_key(selection: Selection) -> list[str]:
    """Return the hashes that identify the documents of a selection in a stage's key."""
    rows = np.ascontiguousarray(selection.dropped, dtype="<i8")
    return [selection.sha256, hashlib.sha256(rows.tobytes()).hexdigest()]


def _drop_rows(selections: list[Selection], rows: list[np.ndarray]) -> list[Selection]:
    return [
        replace(each, documents=each.documents - len(dropped), dropped=np.union1d(each.dropped, dropped))
        for each, dropped in zip(selections, rows, strict=True)
    ]


def _documents_in(read: Output) -> int:
    documents: int = sum(part["documents"] for part in read.metadata["parts"])
    return documents


def _count(selections: list[Selection]) -> int:
    return sum(selection.documents for selection in selections)
