"""engine.micro_batch_size=auto: the number of samples that fit into memory, which is planned once and cached."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from multihop.common.config import MEMORY, select_by_effect
from multihop.common.errors import UserError
from multihop.common.files import read_json_object, sha256_json, write_atomically
from multihop.common.gpus import USABLE
from multihop.common.machine import available_memory, total_memory
from multihop.data_prep.dataset.manifest import read_data_manifest
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.device_type import DeviceType
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.environment import MICRO_BATCH_SIZES

CACHE_FILE = "micro_batch.json"
"""File in the run directory with the micro-batch sizes that were found, and what they depend on."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HOST_MEMORY_SHARE = 0.5
"""Share of a host's free memory that is used: other processes need the rest."""

log = logging.getLogger("multihop")


class Request(TypedDict):
    """What decides the largest micro-batch."""

    recipe: dict[str, object]
    """The sections of `TrainingConfig`."""
    phase: int
    world_size: int
    vocabularies: list[int | None]
    """The fields of `Vocabularies`."""
    device: DeviceType
    prepared: list[str] | None
    """Directories of the prepared data and of its indexes; None: samples are assumed to be full."""
    shard_requests: NotRequired[str | None]
    """As `shard_request_dir` of `BatchBuilder.open`."""
    limit_bytes: float


def micro_batch_sizes(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, shard_request_dir: Path | None = None
) -> list[int]:
    """Samples per micro-batch of each phase: the recipe's number, or as many as fit on every rank by the plan of the
    memory of a step (`multihop.pretrain.plan`).

    A rank's share is divided evenly, so that the last micro-batch is about as large as the others.

    Args:
        shard_request_dir: as for `BatchBuilder.open`.

    Raises:
        UserError: Not even one sample fits.
    """
    if MICRO_BATCH_SIZES in os.environ:
        sizes: list[int] = json.loads(os.environ[MICRO_BATCH_SIZES])
        return sizes
    configured = config.engine.micro_batch_size
    if isinstance(configured, int):
        return [configured] * len(config.phases)
    # Only rank 0 reads the file: the others could see it before or after it is written.
    path = run_dir / CACHE_FILE
    cache: dict[str, Any] = {}
    if ranks.rank == 0 and path.exists():
        cache = read_json_object(path, advice="remove it: what fits is then planned again")
    found = []
    for number, phase in enumerate(config.phases):
        conditions = _conditions(config, run_dir, ranks, number)
        key = sha256_json(conditions)[:16]
        usable = ranks.all_reduce_min(int(usable_bytes(ranks.device, _ranks_on_host(ranks))))

        def find(key: str = key, usable: int = usable, number: int = number, conditions: Any = conditions) -> None:
            if not _fits(cache.get(key), usable):
                request = _request(config, run_dir, ranks, number, usable, shard_request_dir)
                cache[key] = largest_micro_batch(request) | conditions

        ranks.run_on_rank_zero(find)
        samples = ranks.broadcast(cache[key]["samples"] if ranks.rank == 0 else 0)
        if samples < 1:
            raise UserError(
                f"engine.micro_batch_size=auto: not a single sample of phases[{number}] (seq_len={phase.seq_len}) "
                "fits into the memory; set engine.activation_checkpointing=full, a higher engine.zero_stage, or "
                "a smaller model"
            )
        log.info("engine.micro_batch_size: %d samples of %d tokens fit", samples, phase.seq_len)
        found.append(samples)
    if ranks.rank == 0:
        write_atomically(path, json.dumps(cache, indent=1).encode())
    return found


def _fits(entry: dict[str, Any] | None, usable_bytes: int) -> bool:
    """Whether there is a size, and other processes have not taken the memory that it needs."""
    if entry is None or not entry.get("samples"):
        return False
    if entry["bytes"] > usable_bytes:
        log.warning(
            "engine.micro_batch_size: %d samples fitted at an earlier start, and need %.1f GB of the %.1f GB that are "
            "free now; planning again", entry["samples"], entry["bytes"] / 1e9, usable_bytes / 1e9,
        )  # fmt: skip
        return False
    return True


def _conditions(config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int) -> dict[str, Any]:
    """Everything that the size depends on, such as the smallest memory of all ranks. A collective call."""
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


def _request(
    config: TrainingConfig, run_dir: Path, ranks: Ranks, phase: int, limit_bytes: int, shard_request_dir: Path | None
) -> Request:
    data = read_data_manifest(run_dir / "data")
    return {
        "recipe": config.model_dump(mode="json"),
        "phase": phase,
        "world_size": ranks.world_size,
        "vocabularies": [data.output_tokenizer.vocab_size, data.source_vocab_size],
        "device": "cuda" if ranks.device.type == "cuda" else "cpu",
        "prepared": [str(run_dir / "data"), str(run_dir / "index")],
        "shard_requests": str(shard_request_dir) if shard_request_dir else None,
        "limit_bytes": float(limit_bytes),
    }


def largest_micro_batch(request: Request) -> dict[str, Any]:
    """The answer of `multihop.pretrain.plan.micro_batch_worker`, a process of its own that sees no GPU.

    Raises:
        UserError: the recipe cannot be planned.
    """
    command = [sys.executable, "-P", "-m", "multihop.pretrain.plan.micro_batch_worker"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"engine.micro_batch_size=auto: the plan failed: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _memory(ranks: Ranks) -> int:
    """Total memory of this rank's GPU, or its share of the host's, in bytes."""
    if ranks.device.type == "cuda":
        return int(torch.cuda.mem_get_info(ranks.device)[1])
    return total_memory() // _ranks_on_host(ranks)


def _ranks_on_host(ranks: Ranks) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))


def usable_bytes(device: torch.device, ranks_on_host: int) -> float:
    """Free memory of a rank's GPU, or its share of the host's, without the reserve."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return USABLE * torch.cuda.mem_get_info(device)[0]
    return _HOST_MEMORY_SHARE * available_memory() / ranks_on_host
