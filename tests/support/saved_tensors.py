"""Small checkpoints with known content, written as ranks write them."""

import json
from pathlib import Path
from typing import Any

import torch

from multihop.common.files import canonical_json, sha256_json
from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step
from multihop.pretrain.checkpoint.writer import CheckpointWriter

SHAPES = {"word.weight": [7, 5], "norm.bias": [9]}
RUN = "0123456789abcdef" * 2
LAUNCH = f"{RUN[:8]}-0000aaaa"
"""RUN-LAUNCH, as in the names of a launch's files."""
RECIPE = {"seed": 1, "optimizer": {"eps": 1e-06, "betas": [0.9, 0.999]}, "name": "é"}


def whole(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def manifest_of(step: int, world_size: int, shapes: dict[str, list[int]] = SHAPES) -> CheckpointManifest:
    return CheckpointManifest(
        run=RUN,
        step=step,
        tokens=10 * step,
        updates=step,
        skipped=2,
        skipped_in_a_row=1,
        counters={"cur_scale": 65536.0, "growth": 1e-06},
        world_size=world_size,
        zero_stage=1,
        parameters=shapes,
        recipe=RECIPE,
        data_fingerprint="d",
        parent="p",
    )


def write(checkpoints: str, parts: list[dict[str, torch.Tensor]], manifest: CheckpointManifest, **kept: Any) -> str:
    """Save as ranks would, each of which owns a part; returns the checkpoint's location."""
    kept = {"keep": 9, **kept}
    writers = [CheckpointWriter(checkpoints, rank, len(parts), LAUNCH, **kept) for rank in range(len(parts))]
    for writer, part in zip(writers, parts, strict=True):
        writer.save(part, manifest)
    for writer in reversed(writers):
        writer.wait()
    return folder_of_step(checkpoints, manifest.step)


def save(checkpoints: str | Path, step: int, world_size: int, **kept: Any) -> str:
    """Save a checkpoint of which each rank owns an equal slice of every parameter; returns its location."""
    parts = []
    for rank in range(world_size):
        part = {}
        for name, tensor in whole(step).items():
            start, stop = (tensor.numel() * r // world_size for r in (rank, rank + 1))
            part[f"weight/{name}@{start}"] = tensor.view(-1)[start:stop]
        parts.append(part)
    return write(str(checkpoints), parts, manifest_of(step, world_size), **kept)


def rank_file(rank: int) -> str:
    """Return the name of the file that `save` writes."""
    return f"rank-{rank:04d}.{LAUNCH}.safetensors"


def as_given(manifest: CheckpointManifest) -> CheckpointManifest:
    """Return the manifest without what the writer adds."""
    return manifest.model_copy(update={"files": [], "kinds": [], "stripes": None, "sha256": ""})


def as_version_3(folder: str | Path, **changes: Any) -> None:
    """Remove from a manifest what format version 3 did not have; the ranks' files are the same."""
    rewrite_manifest(folder, without=("kinds", "stripes"), format_version=3, **changes)


def rewrite_manifest(folder: str | Path, without: tuple[str, ...] = (), **changes: Any) -> None:
    """Rewrite a manifest with a correct hash, as anyone can."""
    path = Path(folder, "manifest.json")
    content = {**json.loads(path.read_bytes()), **changes}
    for key in ("sha256", *without):
        del content[key]
    path.write_bytes(canonical_json({**content, "sha256": sha256_json(content)}))


def flip(data: bytes, at: int, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[at] ^= 1 << bit
    return bytes(flipped)
