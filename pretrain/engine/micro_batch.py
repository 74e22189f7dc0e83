"""engine.micro_batch=auto: the number of samples that fit into memory is measured once and remembered."""

import json
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.config import MEMORY, part_deciding
from common.files import read_json_object, sha256_json, write_atomically
from pretrain.config import TrainingConfig
from pretrain.data.batches import BatchMaker
from pretrain.engine.activation_checkpointing import checkpoint_activations
from pretrain.engine.inputs import on_device
from pretrain.engine.ranks import Ranks
from pretrain.models.build import Model, build_model, initialise
from pretrain.objectives.batch import Batch

REMEMBERED = "micro_batch.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARE_OF_GPU = 0.9
"""Of the free memory; the rest is for fragmentation and the reduction's buffers."""
_SHARE_OF_HOST = 0.5
"""Of the free memory of a host, which other processes share."""

log = logging.getLogger("multihop")


def micro_batch_sizes(config: TrainingConfig, run_dir: Path, ranks: Ranks, arriving: Path | None = None) -> list[int]:
    """Samples per micro-batch of each phase: the recipe's number, or the most that fit on every rank.

    A rank's share is divided evenly, so that the last micro-batch is about as large as the others.

    Args:
        arriving: as `BatchMaker.open`.

    Raises:
        ValueError: not one sample fits.
    """
    given = config.engine.micro_batch
    if isinstance(given, int):
        return [given] * len(config.phases)
    # Only rank 0 reads the file: the others could see it before or after it is written.
    path = run_dir / REMEMBERED
    known: dict[str, Any] = {}
    if ranks.rank == 0 and path.exists():
        known = read_json_object(path, advice="remove it: what fits is then measured again")
    sizes = []
    for number, phase in enumerate(config.phases):
        decides = _what_decides(config, ranks, number)
        key = sha256_json(decides)[:16]
        fitting = ranks.broadcast(known.get(key, {}).get("fitting", 0))
        if fitting == 0:
            fitting = ranks.all_reduce_min(_measure(config, run_dir, ranks, number, arriving))
            if fitting < 1:
                raise ValueError(
                    f"engine.micro_batch=auto: not a single sample of phases[{number}] (seq_len={phase.seq_len}) fits "
                    "into the memory; set engine.activation_checkpointing=full, a higher engine.zero_stage, or "
                    "a smaller model"
                )
            log.info("engine.micro_batch: %d samples of %d tokens fit", fitting, phase.seq_len)
            known[key] = {"fitting": fitting, **decides}
        share = math.ceil(phase.batch_size / ranks.world_size)
        sizes.append(math.ceil(share / math.ceil(share / min(fitting, share))))
    if ranks.rank == 0:
        write_atomically(path, json.dumps(known, indent=1).encode())
    return sizes


def _what_decides(config: TrainingConfig, ranks: Ranks, phase: int) -> dict[str, Any]:
    """All that how many samples fit depends on."""
    return {
        "world_size": ranks.world_size,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        **{key: part[phase] if key == "phases" else part for key, part in part_deciding(config, MEMORY).items()},
    }


def _measure(config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int, arriving: Path | None) -> int:
    """Samples that fit beside weights, gradients and state, from the memory that small micro-batches take."""
    data, index = run_dir / "data", run_dir / "index"
    inputs = []
    for size in (2, 4):
        maker = BatchMaker.open(config, data, index, 0, 1, [size] * len(config.phases), arriving)
        manifest = maker.data.manifest
        first = sum(earlier.steps for earlier in config.phases[:phase])
        step = maker.step(first)
        inputs.append(max(step.micro_batches, key=lambda batch: batch.tokens))
    model = build_model(config.model, manifest.output_tokenizer.vocab_size, manifest.source_vocab_size)
    initialise(model, config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.engine.activation_checkpointing != "none":
        checkpoint_activations(model, config.engine.activation_checkpointing)
    model = model.to(ranks.device, DTYPES[config.engine.precision])
    needs = _peak_on_gpu if ranks.device.type == "cuda" else _saved_on_cpu
    small, large = (needs(model, batch, ranks.device) for batch in inputs)
    del model
    a_sample = max(1.0, (large - small) / 2)
    room = _room(config, ranks) - _resident_bytes(config, ranks, parameters) - max(0.0, small - 2 * a_sample)
    return int(room / a_sample)


def _room(config: TrainingConfig, ranks: Ranks) -> float:
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        return _SHARE_OF_GPU * torch.cuda.mem_get_info(ranks.device)[0]
    import psutil

    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    return _SHARE_OF_HOST * psutil.virtual_memory().available / on_this_host


def _resident_bytes(config: TrainingConfig, ranks: Ranks, parameters: int) -> float:
    """Bytes of weights, gradients and state that a rank holds (Rajbhandari et al. 2020, section 5.4, table 1)."""
    engine, share = config.engine, 1 / ranks.world_size
    wide = 4 if engine.precision == "fp32" else 2
    weights = wide * (share if engine.zero_stage == 3 else 1)
    gradients = wide * (share if engine.zero_stage >= 2 else 1)
    state = 12 * (share if engine.zero_stage >= 1 else 8 / 12)
    on_host = ranks.device.type == "cuda"
    weights *= 0 if engine.offload == "optimizer+weights" and on_host else 1
    state *= 0 if engine.offload != "none" and on_host else 1
    return parameters * (weights + gradients + state)


def _run(model: Model, batch: Batch, device: torch.device) -> None:
    sums = model(**on_device(batch.inputs, device))
    torch.stack([sums[name].float() for name in batch.counts]).sum().backward()
    model.zero_grad(set_to_none=True)


def _peak_on_gpu(model: Model, batch: Batch, device: torch.device) -> float:
    """Bytes above the weights' that a forward and backward pass takes, gradients left out."""
    _run(model, batch, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(model, batch, device)
    return float(torch.cuda.max_memory_allocated(device) - before)


@dataclass
class _Saved:
    """Counts what autograd keeps for the backward pass, each storage once."""

    storages: dict[int, int] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor


def _saved_on_cpu(model: Model, batch: Batch, device: torch.device) -> float:
    """Twice the bytes that are kept for the backward pass: it makes about as much again, and nothing tells how much."""
    saved = _Saved()
    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
        _run(model, batch, device)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return 2.0 * sum(size for where, size in saved.storages.items() if where not in weights)
