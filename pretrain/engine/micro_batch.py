"""engine.micro_batch_size=auto: the number of samples that fit into memory is measured once and remembered."""

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

from multihop.common.config import MEMORY, select_by_effect
from multihop.common.errors import UserError
from multihop.common.files import read_json_object, sha256_json, write_atomically
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.engine.inputs import on_device
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import Model, build_model, init_weights
from multihop.pretrain.objectives.batch import Batch

REMEMBERED = "micro_batch.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROBED_TOKENS = {"cpu": 256, "cuda": 16_384}
"""Tokens of the smaller of the two micro-batches that are measured. What is measured on a CPU grows with every token;
on a GPU memory comes in blocks, and kernels for few tokens take other amounts."""
_SHARE_OF_GPU = 0.9
"""Share of the free memory that is used; the rest is for fragmentation and the reduction's buffers."""
_NOT_MEASURED = -1
"""Marks a number of samples that could not be measured."""
_SHARE_OF_HOST = 0.5
"""Share of the free memory of a host that is used: other processes share it."""

log = logging.getLogger("multihop")


def micro_batch_sizes(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, shard_request_dir: Path | None = None
) -> list[int]:
    """Samples per micro-batch of each phase: the recipe's number, or the most that fit on every rank.

    A rank's share is divided evenly, so that the last micro-batch is about as large as the others.

    Args:
        shard_request_dir: as `BatchBuilder.open`.

    Raises:
        UserError: not one sample fits.
    """
    given = config.engine.micro_batch_size
    if isinstance(given, int):
        return [given] * len(config.phases)
    # Only rank 0 reads the file: the others could see it before or after it is written.
    path = run_dir / REMEMBERED
    known: dict[str, Any] = {}
    if ranks.rank == 0 and path.exists():
        known = read_json_object(path, advice="remove it: what fits is then measured again")
    sizes = []
    for number, phase in enumerate(config.phases):
        decides = _what_decides(config, run_dir, ranks, number)
        key = sha256_json(decides)[:16]
        fitting = ranks.broadcast(known.get(key, {}).get("fitting", 0))
        if fitting == 0:
            mine, bytes_per_sample = _measure(config, run_dir, ranks, number, shard_request_dir)
            fitting = ranks.all_reduce_min(mine)
            if fitting == _NOT_MEASURED:
                raise UserError(
                    f"engine.micro_batch_size=auto: two micro-batches of phases[{number}], one with twice the samples, "
                    "took the same memory, so the size that fits is unknown; set engine.micro_batch_size to a number"
                )
            if fitting < 1:
                raise UserError(
                    f"engine.micro_batch_size=auto: not a single sample of phases[{number}] (seq_len={phase.seq_len}) "
                    "fits into the memory; set engine.activation_checkpointing=full, a higher engine.zero_stage, or "
                    "a smaller model"
                )
            log.info("engine.micro_batch_size: %d samples of %d tokens fit", fitting, phase.seq_len)
            known[key] = {"fitting": fitting, "bytes_per_sample": bytes_per_sample, **decides}
        share = math.ceil(phase.global_batch_size / ranks.world_size)
        sizes.append(math.ceil(share / math.ceil(share / min(fitting, share))))
    if ranks.rank == 0:
        write_atomically(path, json.dumps(known, indent=1).encode())
    return sizes


def _what_decides(config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int) -> dict[str, Any]:
    """Everything that the fitting micro-batch depends on, with the smallest memory of all ranks. A collective call."""
    data = read_data_manifest(run_dir / "data")
    return {
        "world_size": ranks.world_size,
        "device": torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu",
        "memory": ranks.all_reduce_min(_memory(ranks)),
        "torch": torch.__version__,
        "vocabularies": [data.output_tokenizer.vocab_size, data.source_vocab_size],
        "share": math.ceil(config.phases[phase].global_batch_size / ranks.world_size),
        **{key: part[phase] if key == "phases" else part for key, part in select_by_effect(config, MEMORY).items()},
    }


def _measure(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int, shard_request_dir: Path | None
) -> tuple[int, float]:
    """Samples that fit beside weights, gradients and state, and bytes per sample, measured with two micro-batches."""
    parameters, bytes_per_sample, alone = _try_out(config, run_dir, ranks, phase, shard_request_dir)
    if bytes_per_sample <= 0:
        return _NOT_MEASURED, bytes_per_sample
    # The model that was tried out is gone: what is free is asked now.
    room = _room(config, ranks) - _resident_bytes(config, ranks, parameters) - alone
    return max(0, int(room / bytes_per_sample)), bytes_per_sample


def _try_out(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int, shard_request_dir: Path | None
) -> tuple[int, float, float]:
    """The model's parameters, and the `memory_line` of its micro-batches."""
    manifest = read_data_manifest(run_dir / "data")
    model = build_model(config.model, manifest.output_tokenizer.vocab_size, manifest.source_vocab_size)
    init_weights(model, config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.engine.activation_checkpointing != "none":
        checkpoint_activations(model, config.engine.activation_checkpointing)
    model = model.to(ranks.device, DTYPES[config.engine.precision])
    takes = _peak_on_gpu if ranks.device.type == "cuda" else _saved_on_cpu
    # Steps of a batch-size ramp may have fewer samples than a micro-batch of the phase.
    phases = [each.model_copy(update={"batch_ramp": []}) for each in config.phases]
    without_ramps = config.model_copy(update={"phases": phases})

    def bytes_of(size: int) -> float:
        sizes = [size] * len(config.phases)
        maker = BatchBuilder.open(without_ramps, run_dir / "data", run_dir / "index", 0, 1, sizes, shard_request_dir)
        first_step = sum(earlier.steps for earlier in config.phases[:phase])
        maker.request_shards(first_step)
        step = maker.step(first_step)
        return takes(model, max(step.micro_batches, key=lambda batch: batch.tokens), ranks.device)

    share = math.ceil(config.phases[phase].global_batch_size / ranks.world_size)
    return parameters, *memory_line(bytes_of, config.phases[phase].seq_len, share, ranks.device.type)


def memory_line(bytes_of: Callable[[int], float], seq_len: int, share: int, device_type: str) -> tuple[float, float]:
    """Bytes that each sample of a micro-batch takes, and bytes that the first takes besides.

    Two micro-batches are measured. They are large enough for the activations to be more than rounding beside what
    does not grow with the samples, and no larger than a rank's share of a step; after an out-of-memory error smaller
    ones are.

    Args:
        bytes_of: measures a micro-batch of so many samples.
        share: of a step, in samples.

    Returns:
        Bytes per sample, and bytes that do not depend on the number of samples. Bytes per sample are infinite if one
        sample does not fit, and at most 0 if the larger micro-batch took no more.
    """
    large = min(2 * max(2, _PROBED_TOKENS[device_type] // seq_len), share)
    while large > 0:
        small = large // 2
        try:
            most, least = bytes_of(large), bytes_of(small) if small else 0.0
        except torch.OutOfMemoryError:
            large = 2 if large == 3 else large // 2  # one sample alone does not tell what the others take
            continue
        bytes_per_sample = (most - least) / (large - small)
        return bytes_per_sample, max(0.0, most - large * bytes_per_sample)
    return math.inf, 0.0


def _memory(ranks: Ranks) -> int:
    """Total memory of this rank's GPU, or its share of the host's, in bytes."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.device)[1])
    import psutil

    return int(psutil.virtual_memory().total) // _ranks_on_host(ranks)


def _ranks_on_host(ranks: Ranks) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


def _room(config: TrainingConfig, ranks: Ranks) -> float:
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        return _SHARE_OF_GPU * torch.cuda.mem_get_info(ranks.device)[0]
    import psutil

    return _SHARE_OF_HOST * psutil.virtual_memory().available / _ranks_on_host(ranks)


def _resident_bytes(config: TrainingConfig, ranks: Ranks, parameters: int) -> float:
    """Bytes of weights, gradients and state that a rank holds (Rajbhandari et al. 2020, section 5.4, table 1)."""
    engine, share = config.engine, 1 / ranks.world_size
    wide = 4 if engine.precision == "fp32" else 2
    weights = wide * (share if engine.zero_stage == 3 else 1)
    gradients = 4 * (share if engine.zero_stage >= 2 else 1)  # narrow ones are added up in fp32
    state = 12 * (share if engine.zero_stage >= 1 else 8 / 12)
    on_host = ranks.device.type == "cuda"
    weights *= 0 if engine.offload == "optimizer+weights" and on_host else 1
    state *= 0 if engine.offload != "none" and on_host else 1
    return parameters * (weights + gradients + state)


def _run(model: Model, batch: Batch, device: torch.device) -> None:
    sums = model(**on_device(batch.inputs, device))
    torch.stack([sums[name].float() for name in batch.counts]).sum().backward()


def _peak_on_gpu(model: Model, batch: Batch, device: torch.device) -> float:
    """Bytes above those of weights and gradients that a forward and backward pass takes.

    The gradients of a pass before stay in memory meanwhile: without them a small micro-batch would have its peak at the
    end of the backward pass, where all gradients exist and no activations, and a second one of twice the samples would
    have the same.
    """
    _run(model, batch, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(model, batch, device)
    peak = torch.cuda.max_memory_allocated(device)
    model.zero_grad(set_to_none=True)
    return float(peak - before)


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
    model.zero_grad(set_to_none=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return 2.0 * sum(size for where, size in saved.storages.items() if where not in weights)
