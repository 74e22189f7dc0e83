"""engine.micro_batch_size=auto: the number of samples that fit into memory, which is measured once and cached."""

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
from multihop.common.machine import available_memory, total_memory
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.engine.activation_checkpointing import checkpoint_activations
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import Model, build_model, init_weights
from multihop.pretrain.objectives.batch import Batch

CACHE_FILE = "micro_batch.json"
"""File in the run directory with the fitted micro-batch sizes, and what they depend on."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PROBED_TOKENS = {"cpu": 256, "cuda": 16_384}
"""Tokens of the smaller of the two micro-batches that are measured. On a CPU the measured memory grows with each token;
on a GPU memory is allocated in blocks, and kernels for few tokens take other amounts."""
_GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's free memory that is used; the rest is for fragmentation and the reduction's buffers."""
_NOT_MEASURED = -1
"""Instead of a number of samples: it could not be measured."""
_HOST_MEMORY_SHARE = 0.5
"""Share of a host's free memory that is used: other processes need the rest."""

log = logging.getLogger("multihop")


def micro_batch_sizes(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, shard_request_dir: Path | None = None
) -> list[int]:
    """Samples per micro-batch of each phase: the recipe's number, or as many as fit on every rank.

    A rank's share is divided evenly, so that the last micro-batch is about as large as the others.

    Args:
        shard_request_dir: as for `BatchBuilder.open`.

    Raises:
        UserError: Not even one sample fits, or it is unknown how many do.
    """
    configured = config.engine.micro_batch_size
    if isinstance(configured, int):
        return [configured] * len(config.phases)
    # Only rank 0 reads the file: the others could see it before or after it is written.
    path = run_dir / CACHE_FILE
    cache: dict[str, Any] = {}
    if ranks.rank == 0 and path.exists():
        cache = read_json_object(path, advice="remove it: what fits is then measured again")
    sizes = []
    for number, phase in enumerate(config.phases):
        conditions = _conditions(config, run_dir, ranks, number)
        key = sha256_json(conditions)[:16]
        usable = ranks.all_reduce_min(int(_usable_bytes(ranks)))
        share = math.ceil(phase.global_batch_size / ranks.world_size)
        fitting = ranks.broadcast(_cached_size(cache.get(key), share, usable))
        if fitting == 0:
            local_fitting, bytes_per_sample, other_bytes = _measure(config, run_dir, ranks, number, shard_request_dir)
            fitting = ranks.all_reduce_min(local_fitting)
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
            measured = {"fitting": fitting, "bytes_per_sample": bytes_per_sample, "other_bytes": other_bytes}
            cache[key] = measured | conditions
        sizes.append(math.ceil(share / math.ceil(share / min(fitting, share))))
    if ranks.rank == 0:
        write_atomically(path, json.dumps(cache, indent=1).encode())
    return sizes


def _cached_size(entry: dict[str, Any] | None, share: int, usable_bytes: int) -> int:
    """The cached number of samples; 0 if there is none, or other processes have taken the memory that it needs."""
    if entry is None:
        return 0
    needed = min(entry["fitting"], share) * entry["bytes_per_sample"] + entry.get("other_bytes", 0.0)
    if needed > usable_bytes:
        log.warning(
            "engine.micro_batch_size: %d samples fitted at an earlier start, and need %.1f GB of the %.1f GB that are "
            "free now; measuring again", entry["fitting"], needed / 1e9, usable_bytes / 1e9,
        )  # fmt: skip
        return 0
    return int(entry["fitting"])


def _conditions(config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int) -> dict[str, Any]:
    """Everything that the fitting size depends on, such as the smallest memory of all ranks. A collective call."""
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
) -> tuple[int, float, float]:
    """Samples that fit next to weights, gradients and state; bytes per sample, measured with two micro-batches; and all
    other bytes."""
    parameters, bytes_per_sample, fixed_bytes = _measure_micro_batches(config, run_dir, ranks, phase, shard_request_dir)
    other_bytes = _resident_bytes(config, ranks, parameters) + fixed_bytes
    if bytes_per_sample <= 0:
        return _NOT_MEASURED, bytes_per_sample, other_bytes
    # By now the model that was measured is freed.
    available = _usable_bytes(ranks) - other_bytes
    return max(0, int(available / bytes_per_sample)), bytes_per_sample, other_bytes


def _measure_micro_batches(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int, shard_request_dir: Path | None
) -> tuple[int, float, float]:
    """The model's number of parameters, and the result of `fit_memory` for its micro-batches."""
    manifest = read_data_manifest(run_dir / "data")
    model = build_model(config.model, manifest.output_tokenizer.vocab_size, manifest.source_vocab_size)
    init_weights(model, config.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.engine.activation_checkpointing != "none":
        checkpoint_activations(model, config.engine.activation_checkpointing)
    model = model.to(ranks.device, DTYPES[config.engine.precision])
    measure = _peak_bytes_on_gpu if ranks.device.type == "cuda" else _saved_bytes_on_cpu
    # Steps of a batch-size ramp may have fewer samples than a micro-batch of the phase.
    phases = [each.model_copy(update={"batch_ramp": []}) for each in config.phases]
    without_ramps = config.model_copy(update={"phases": phases})

    def bytes_of(size: int) -> float:
        sizes = [size] * len(config.phases)
        builder = BatchBuilder.open(without_ramps, run_dir / "data", run_dir / "index", 0, 1, sizes, shard_request_dir)
        first_step = sum(earlier.steps for earlier in config.phases[:phase])
        builder.request_shards(first_step)
        step = builder.step(first_step)
        return measure(model, max(step.micro_batches, key=lambda batch: batch.tokens), ranks.device)

    share = math.ceil(config.phases[phase].global_batch_size / ranks.world_size)
    return parameters, *fit_memory(bytes_of, config.phases[phase].seq_len, share, ranks.device.type)


def fit_memory(bytes_of: Callable[[int], float], seq_len: int, share: int, device_type: str) -> tuple[float, float]:
    """Fit a line to the memory of micro-batches: bytes per sample, and bytes that do not depend on the samples.

    Two micro-batches are measured. They are large enough that activations are not negligible next to the memory that
    does not grow with the samples, and no larger than a rank's share of a step. After an out-of-memory error, smaller
    ones are tried.

    Args:
        bytes_of: measures a micro-batch, given its number of samples.
        share: a rank's share of a step, in samples.

    Returns:
        Bytes per sample, and bytes that do not depend on the number of samples. Bytes per sample are infinite if one
        sample does not fit, and at most 0 if the larger micro-batch took no more memory.
    """
    large = min(2 * max(2, _PROBED_TOKENS[device_type] // seq_len), share)
    while large > 0:
        small = large // 2
        try:
            most, least = bytes_of(large), bytes_of(small) if small else 0.0
        except torch.OutOfMemoryError:
            large = 2 if large == 3 else large // 2  # one sample alone does not show the memory of further ones
            continue
        bytes_per_sample = (most - least) / (large - small)
        return bytes_per_sample, max(0.0, most - large * bytes_per_sample)
    return math.inf, 0.0


def _memory(ranks: Ranks) -> int:
    """Total memory of this rank's GPU, or its share of the host's, in bytes."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.device)[1])
    return total_memory() // _ranks_on_host(ranks)


def _ranks_on_host(ranks: Ranks) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


def _usable_bytes(ranks: Ranks) -> float:
    """Free memory of this rank's GPU, or its share of the host's, without the reserve."""
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
        return _GPU_MEMORY_SHARE * torch.cuda.mem_get_info(ranks.device)[0]
    return _HOST_MEMORY_SHARE * available_memory() / _ranks_on_host(ranks)


def _resident_bytes(config: TrainingConfig, ranks: Ranks, parameters: int) -> float:
    """Bytes of weights, gradients and state that a rank holds (Rajbhandari et al. 2020, section 5.4, table 1)."""
    engine, share = config.engine, 1 / ranks.world_size
    weight_bytes = 4 if engine.precision == "fp32" else 2
    weights = weight_bytes * (share if engine.zero_stage == 3 else 1)
    gradients = 4 * (share if engine.zero_stage >= 2 else 1)  # half-precision ones are accumulated in fp32
    state = 12 * (share if engine.zero_stage >= 1 else 8 / 12)
    on_gpu = ranks.device.type == "cuda"  # else what is offloaded stays in the same memory
    weights *= 0 if engine.offload == "optimizer+weights" and on_gpu else 1
    state *= 0 if engine.offload != "none" and on_gpu else 1
    return parameters * (weights + gradients + state)


def _run(model: Model, batch: Batch, device: torch.device) -> None:
    sums = model(**to_device(batch.inputs, device))
    torch.stack([sums[name].float() for name in batch.counts]).sum().backward()


def _peak_bytes_on_gpu(model: Model, batch: Batch, device: torch.device) -> float:
    """Peak bytes of a forward and backward pass, beyond those of weights and gradients.

    The gradients of an earlier pass stay in memory: without them, a small micro-batch would have its peak at the end of
    the backward pass, where all gradients and no activations exist, and so would one of twice the samples.
    """
    _run(model, batch, device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(model, batch, device)
    peak = torch.cuda.max_memory_allocated(device)
    model.zero_grad(set_to_none=True)
    return float(peak - before)


@dataclass
class _SavedTensors:
    """Counts the bytes that autograd saves for the backward pass, each storage once."""

    storages: dict[int, int] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor


def _saved_bytes_on_cpu(model: Model, batch: Batch, device: torch.device) -> float:
    """Twice the bytes that are saved for the backward pass, which allocates about as much; that cannot be measured."""
    saved = _SavedTensors()
    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, unpack):
        _run(model, batch, device)
    model.zero_grad(set_to_none=True)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return 2.0 * sum(size for address, size in saved.storages.items() if address not in weights)
