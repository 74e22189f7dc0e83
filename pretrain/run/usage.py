"""What a step costs: floating-point operations, and what rank 0 takes of its machine, under names that MLflow shows as
system metrics."""

import resource
import sys

import numpy as np
import torch

from multihop.common.json_lines import Row
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.packed_tokens import PackedTokens

_BYTES = 1 if sys.platform == "darwin" else 1024
"""In the unit of ru_maxrss."""


def step_flops(model: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """FLOPs of a forward and backward pass over a batch; 0 for a borrowed batch (all counts 0)."""
    if not any(batch.counts.values()):
        return 0.0
    *sources, lengths = [
        np.diff(packed.cu_seqlens) for packed in batch.inputs.values() if isinstance(packed, PackedTokens)
    ]
    return model.train_flops(vocab_size, lengths, len(batch.targets), sources[0] if sources else None)


def usage(device: torch.device, cpu_s: float, elapsed_s: float) -> Row:
    """CPU cores busy with this process, and its peak memory on the host and the GPU so far, in GB (1e9 bytes).

    Args:
        cpu_s: seconds of CPU time that it took within `elapsed_s`.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES
    row = {"system/cpu_cores": cpu_s / elapsed_s, "system/peak_memory_gb": peak / 1e9}
    if device.type == "cuda":  # the allocator's own count: without waiting for the device
        row["system/gpu_peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return row
