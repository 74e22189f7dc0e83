"""Measure how the removal of duplicates grows with the data: `python bench/scale_preparation.py SUBCOMMAND`.

    duplicates   find copies and near duplicates, by the number of documents
    plan         the keys of the tasks that find them, by the number of splits of 100,000 documents each

Documents have 30 random words; every tenth differs in its last word from the one before, and every hundredth not at
all. A split has 100,000 documents, and its tasks run one after another in one process.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scale_data import Row, main, measure

from multihop.data_prep.config import NearDuplicatesConfig
from multihop.data_prep.duplicates.exact import FindCopies, SortHashes, find_copies, hash_ranges, sort_hashes
from multihop.data_prep.duplicates.near import (
    CandidatePairs,
    FindClusters,
    candidate_pairs,
    find_clusters,
    plan_comparisons,
)
from multihop.data_prep.duplicates.signature_files import SignSplit, band_count, sign_split, signature_bytes
from multihop.data_prep.pipeline.select_documents import drop_near_duplicates
from multihop.data_prep.stages.documents import SCHEMA, Selection
from multihop.data_prep.stages.outputs import Output, file_on_shared_disk, write_batches
from multihop.data_prep.stages.runner import StageRunner

SPLIT = 100_000
WORDS, VOCABULARY = 30, 50_000
NOTHING = np.empty(0, np.int64)
CONFIG = NearDuplicatesConfig()


def duplicates(folder: Path, size: int) -> Iterator[Row]:
    """Measure the stages that find copies and near duplicates among `size` documents."""
    work = folder / f"{size}"
    work.mkdir()
    paths = [write_split(work / f"split-{number}.arrow", number) for number in range(size // SPLIT)]
    selections = [Selection(str(path), path.name, SPLIT, NOTHING) for path in paths]

    def outputs(stage: str) -> list[str]:
        return [str(work / f"{stage}-{number}.arrow") for number in range(len(paths))]

    def sort() -> dict[str, Any]:
        runs = [sort_hashes(SortHashes(f"sort-{i}", str(work), each)) for i, each in enumerate(selections)]
        return {"bytes_per_document": round(sum(Path(run.path).stat().st_size for run in runs) / size, 1)}

    def copies() -> dict[str, Any]:
        ranges, runs = hash_ranges(size), tuple(outputs("sort"))
        found = [find_copies(FindCopies(f"copies-{low}", str(work), runs, low, high)) for low, high in ranges]
        return {"copies": sum(output.metadata["copies"] for output in found)}

    def sign() -> dict[str, Any]:
        for number, path in enumerate(paths):
            sign_split(SignSplit(f"sign-{number}", str(work), str(path), NOTHING, CONFIG))
        on_disk = sum(Path(path).stat().st_size for path in outputs("sign")) / size
        return {"bytes_per_document": round(on_disk, 1), "by_formula": signature_bytes(CONFIG)}

    tasks = plan_comparisons(size, band_count(CONFIG))

    def compare() -> dict[str, Any]:
        items = [
            CandidatePairs(f"pairs-{number}", str(work), outputs("sign"), *task, CONFIG.threshold)
            for number, task in enumerate(tasks)
        ]
        pairs = [candidate_pairs(item).metadata["pairs"] for item in items]
        return {"tasks": len(tasks), "pairs": sum(pairs)}

    def cluster() -> dict[str, Any]:
        pairs = [str(work / f"pairs-{number}.npy") for number in range(len(tasks))]
        return {
            "dropped": find_clusters(FindClusters("clusters", str(work), outputs("sign"), pairs)).metadata["dropped"]
        }

    yield measure("copies: sort", sort)
    yield measure("copies: find", copies)
    yield measure("near duplicates: sign", sign)
    yield measure("near duplicates: compare", compare)
    yield measure("near duplicates: cluster", cluster)


def write_split(path: Path, seed: int) -> Path:
    """Write a split of made-up documents, as `read_split` does."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, (SPLIT, WORDS))
    for every, differing in ((10, 1), (100, 0)):
        ids[every::every, : WORDS - differing] = ids[every - 1 : -1 : every, : WORDS - differing]
    vocabulary = pa.array([f"word{number:05d}" for number in range(VOCABULARY)])
    lists = pa.ListArray.from_arrays(
        np.arange(0, ids.size + 1, WORDS, dtype=np.int32), vocabulary.take(pa.array(ids.ravel()))
    )
    texts = pc.binary_join(lists, " ")
    digests = [hashlib.sha256(text.encode()).digest()[:16] for text in texts.to_pylist()]
    words = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2).astype(np.uint64)
    sizes = pc.binary_length(texts).cast(pa.uint32())
    columns = [pa.array(words[:, 0]), pa.array(words[:, 1]), sizes, pa.array(np.zeros(SPLIT, np.uint16)), texts]
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    write_batches(path, SCHEMA, (batch.slice(start, 10_000) for start in range(0, SPLIT, 10_000)), "lz4")
    return path


def plan(folder: Path, size: int) -> Iterator[Row]:
    """Measure planning the stages of `size` splits, whose tasks do nothing."""
    selections = [
        Selection(f"split-{number}", hashlib.sha256(str(number).encode()).hexdigest(), SPLIT, NOTHING)
        for number in range(size)
    ]
    empty = str(folder / "nothing.arrow")
    find_clusters(FindClusters("nothing", str(folder), [], []))

    def nothing(stage: str, function: Any, items: Any) -> Iterator[Output]:
        tasks[stage] = len(items)
        for item in items:
            sha256 = hashlib.sha256(item.key.encode()).hexdigest()
            yield Output(item.key, empty, sha256, {"documents": SPLIT, "dropped": 0, "copies": 0})

    tasks: dict[str, int] = {}
    runner = StageRunner(nothing, file_on_shared_disk)

    def near() -> dict[str, Any]:
        drop_near_duplicates(folder, selections, CONFIG, runner)
        return {"tasks": sum(tasks.values())}

    yield measure("plan near duplicates", near)


if __name__ == "__main__":
    main(__doc__, {"duplicates": (duplicates, [100_000, 1_000_000]), "plan": (plan, [100, 1_000, 10_000])})
