"""Assigns batches of encoded splits to shards, and describes shards for the manifest."""

from itertools import chain
from pathlib import Path
from typing import Any, Literal

from multihop.data_prep.dataset.manifest import Shard, Totals
from multihop.data_prep.dataset.shards import SHARD_BYTES
from multihop.data_prep.pipeline.encode import AssembleShard
from multihop.data_prep.stages.outputs import Output, stage_key

Batches = list[dict[str, Any]]
"""Facts of `encode_split` on batches, each with path and hash of its file and its number there."""


def plan_shards(encoded: list[Output], split: str) -> list[Batches]:
    """The batches of each shard of `split`, in the order of the input, about SHARD_BYTES per shard."""
    shards: list[Batches] = []
    room = 0
    for output in encoded:
        for number, facts in enumerate(output.facts["batches"]):
            if facts["split"] != split:
                continue
            if not shards or facts["bytes"] > room:
                shards.append([])
                room = SHARD_BYTES
            shards[-1].append({**facts, "path": output.path, "sha256": output.sha256, "number": number})
            room -= facts["bytes"]
    return shards


def shard_items(
    work: Path, out_dir: Path, beside: Path, split: Literal["train", "heldout"], plan: list[Batches]
) -> list[AssembleShard]:
    items = []
    for number, batches in enumerate(plan):
        target = out_dir / f"{split}-{number:05d}.arrow"
        key = stage_key("shard", [], target.name, [[batch["sha256"], batch["number"]] for batch in batches])
        chosen = [(batch["path"], batch["number"]) for batch in batches]
        made = beside / target.name
        items.append(AssembleShard(key, str(work / "shards"), split, str(target), str(made), chosen))
    return items


def shard_entry(item: AssembleShard, batches: Batches, output: Output) -> Shard:
    return Shard(
        file=Path(item.target).name,
        split=item.split,
        documents=sum(facts["documents"] for facts in batches),
        tokens=sum(facts["tokens"] for facts in batches),
        bytes=output.facts["bytes"],
        sha256=output.sha256,
    )


def totals(plan: list[Batches]) -> Totals:
    batches = list(chain(*plan))
    names = ("documents", "sentences", "tokens", "text_bytes")
    return Totals(**{name: sum(facts[name] for facts in batches) for name in names})
