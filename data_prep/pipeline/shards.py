"""The stages that assemble shards from batches of encoded splits, in order, and count their tokens."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from multihop.common.errors import UserError
from multihop.data_prep.dataset.manifest import Shard, Totals
from multihop.data_prep.dataset.shards import SHARD_BYTES, count_target_tokens, count_tokens, write_shard
from multihop.data_prep.stages.outputs import Output, finished_output, stage_key, write_once
from multihop.data_prep.stages.runner import StageRunner

DatasetSplit = Literal["train", "heldout"]
SPLITS: tuple[DatasetSplit, DatasetSplit] = ("train", "heldout")

BatchFacts = list[dict[str, Any]]
"""Metadata of `encode_split` on batches, each with path and SHA-256 of its file and its number in the file."""


@dataclass(frozen=True)
class AssembleShard:
    """Assemble a shard from batches of encoded splits, (path, number) in order."""

    key: str
    folder: str
    split: DatasetSplit
    target: str
    """The shard's path in the data set."""
    staging: str
    """The path to write it to if it is not at its target, where another data set may be, and in use."""
    batches: list[tuple[str, int]]


@dataclass(frozen=True)
class AssembledShards:
    """Holds the shards of both splits, train first, with the totals for the manifest."""

    items: list[AssembleShard]
    outputs: list[Output]
    entries: list[Shard]
    totals: dict[DatasetSplit, Totals]


def assemble_shards(
    work: Path, out_dir: Path, staging: Path, encoded: list[Output], needs_heldout: bool, runner: StageRunner
) -> AssembledShards:
    """Run the stage "shards".

    Raises:
        UserError: the train documents, or the held-out documents that are needed, have no token.
    """
    plan = {split: plan_shards(encoded, split) for split in SPLITS}
    if not plan["train"] or (needs_heldout and not plan["heldout"]):
        raise UserError("the train or the held-out documents have no token; add text")
    items = [item for split in SPLITS for item in _shard_items(work, out_dir, staging, split, plan[split])]
    outputs = runner.outputs("shards", assemble_shard, items)
    entries = [_shard_entry(*shard) for shard in zip(items, chain(*plan.values()), outputs, strict=True)]
    return AssembledShards(items, outputs, entries, {split: _totals(plan[split]) for split in SPLITS})


def count_train_tokens(shards: AssembledShards, vocab_size: int, pairs: bool, runner: StageRunner) -> np.ndarray:
    """Run the stage "count"; returns int64 (vocab_size,), see `TokenCounts`."""
    items = [
        (output.path, vocab_size)
        for output, entry in zip(shards.outputs, shards.entries, strict=True)
        if entry.split == "train"
    ]
    counts: Iterable[np.ndarray] = runner.map("count", count_target_tokens if pairs else count_tokens, items)
    total = np.zeros(vocab_size, dtype=np.int64)
    for shard_counts in counts:
        total += shard_counts
    return total


def plan_shards(encoded: list[Output], split: DatasetSplit) -> list[BatchFacts]:
    """Assign the batches of `split`, in the order of the input, to shards of about SHARD_BYTES."""
    shards: list[BatchFacts] = []
    room = 0
    for output in encoded:
        for number, batch in enumerate(output.metadata["batches"]):
            if batch["split"] != split:
                continue
            if not shards or batch["bytes"] > room:
                shards.append([])
                room = SHARD_BYTES
            shards[-1].append({**batch, "path": output.path, "sha256": output.sha256, "number": number})
            room -= batch["bytes"]
    return shards


def assemble_shard(item: AssembleShard) -> Output:
    """Write a shard to its staging path, unless it is in the data set; record it in FOLDER/KEY.json.

    Metadata: "bytes", its size.
    """

    def write(path: Path) -> dict[str, Any]:
        batches = []
        readers: dict[str, pa.ipc.RecordBatchFileReader] = {}
        for source, number in item.batches:
            if source not in readers:
                readers[source] = pa.ipc.open_file(pa.memory_map(source))
            batches.append(readers[source].get_batch(number))
        write_shard(path, batches)
        return {"bytes": path.stat().st_size}

    entry = Path(item.folder) / f"{item.key}.json"
    return finished_output(entry, Path(item.target)) or write_once(entry, Path(item.staging), write)


def _shard_items(
    work: Path, out_dir: Path, staging: Path, split: DatasetSplit, plan: list[BatchFacts]
) -> list[AssembleShard]:
    items = []
    for number, batches in enumerate(plan):
        target = out_dir / f"{split}-{number:05d}.arrow"
        key = stage_key("shard", [], target.name, [[batch["sha256"], batch["number"]] for batch in batches])
        chosen = [(batch["path"], batch["number"]) for batch in batches]
        items.append(AssembleShard(key, str(work / "shards"), split, str(target), str(staging / target.name), chosen))
    return items


def _shard_entry(item: AssembleShard, batches: BatchFacts, output: Output) -> Shard:
    return Shard(
        file=Path(item.target).name,
        split=item.split,
        documents=sum(batch["documents"] for batch in batches),
        tokens=sum(batch["tokens"] for batch in batches),
        bytes=output.metadata["bytes"],
        sha256=output.sha256,
    )


def _totals(plan: list[BatchFacts]) -> Totals:
    batches = list(chain(*plan))
    names = ("documents", "sentences", "tokens", "text_bytes")
    return Totals(**{name: sum(batch[name] for batch in batches) for name in names})
