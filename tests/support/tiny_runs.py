"""Runs as training leaves them, with checkpoints of tiny models with random weights."""

import json
import uuid
from pathlib import Path
from typing import Any

import torch
from kinds_of_families import AT_HUGGING_FACE

from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.writer import CheckpointWriter
from multihop.pretrain.models.build import build_model, init_weights
from multihop.pretrain.models.families import parse_model_config

SIZES = {"layers": 2, "hidden": 32, "heads": 2, "max_positions": 64}
MASKED = [name for name, family in AT_HUGGING_FACE.items() if not family.causal]
CAUSAL = [name for name, family in AT_HUGGING_FACE.items() if family.causal]
IN_MASKED_PIPELINE = [name for name in MASKED if AT_HUGGING_FACE[name].auto_class != "AutoModelForCausalLM"]
"""Masked models that transformers' fill-mask pipeline opens."""


def make_run(folder: Path, data: Path, family: str, steps: tuple[int, ...] = (3, 7), **changes: Any) -> Path:
    """Make a run's folder with a checkpoint of random weights for each step; `changes` are keys of the model."""
    model = {"family": family, **SIZES, **({"embedding": 16} if family == "albert" else {}), **changes}
    config = parse_model_config(model)
    info = read_data_manifest(data).tokenizer
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(data)
    (folder / "recipe.json").write_text(
        json.dumps({"name": folder.name, "model": model, "phases": [{"seq_len": 64, "steps": 9}]})
    )
    for step in steps:
        network = build_model(config, info.vocab_size)
        init_weights(network, seed=step)
        generator = torch.Generator().manual_seed(step)
        for parameter in network.parameters():  # no bias may be 0, or it could be lost unseen
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        manifest = CheckpointManifest(
            step=step, tokens=0, updates=step, world_size=1, zero_stage=1, data_fingerprint="d",
            parameters={name: list(parameter.shape) for name, parameter in network.named_parameters()},
            recipe={"model": config.model_dump(mode="json")}, tokenizer_sha256=info.sha256,
        )  # fmt: skip
        writer = CheckpointWriter(str(folder / "checkpoints"), 0, 1, uuid.uuid4().hex, keep=9)
        live = {f"weight/{name}@0": parameter.data.view(-1) for name, parameter in network.named_parameters()}
        writer.save(live, manifest)
        writer.wait()
    return folder
