"""Throughput of a run: tokens and FLOPs per second, and rank 0's system metrics, under MLflow's prefix."""

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from multihop.common.gpus import datasheet_rate
from multihop.common.json_lines import Row
from multihop.pretrain.data.batches import RankBatch
from multihop.pretrain.models.config import ModelConfig
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.packed_tokens import PackedTokens

_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit of ru_maxrss."""


@dataclass
class ThroughputMeter:
    """Measures the steps since the last logged one: time, tokens, FLOPs, and the time spent waiting for batches."""

    started: float = field(default_factory=time.monotonic)
    cpu_started: float = field(default_factory=time.process_time)
    waited_s: float = 0.0
    tokens: int = 0
    flops: float = 0.0

    def next_batch(self, batches: Iterator[RankBatch]) -> RankBatch | None:
        """Wait for the next batch; None after the last one."""
        before = time.monotonic()
        batch = next(batches, None)
        self.waited_s += time.monotonic() - before
        return batch

    def count(self, totals: Mapping[str, float]) -> None:
        """Count a step whose `tokens` and `flops`, summed over all ranks, are in `totals`."""
        self.tokens += int(totals["tokens"])
        self.flops += totals["flops"]

    def rates(self, peak_flops: float, device: torch.device) -> Row:
        """Metrics of the counted steps; `mfu` is the fraction of `peak_flops`, the peak rate of all ranks' devices."""
        elapsed = time.monotonic() - self.started
        return {
            "tokens_per_s": self.tokens / elapsed,
            "data_wait": self.waited_s / elapsed,
            "tflops_per_s": self.flops / elapsed / 1e12,
            "mfu": self.flops / elapsed / peak_flops,
            **usage(device, time.process_time() - self.cpu_started, elapsed),
        }


def peak_rate(device: torch.device, precision: str, measured: float) -> float:
    """The peak rate of a device in FLOP/s: its datasheet's for bf16 and fp16 on a known GPU, or else that of a large
    matrix product, which is lower.

    Args:
        precision: `engine.precision`.
        measured: the result of `matmul_rate`.
    """
    if device.type != "cuda" or precision == "fp32":
        return measured
    return datasheet_rate(torch.cuda.get_device_name(device)) or measured


def step_flops(model: ModelConfig, vocab_size: int, batch: Batch) -> float:
    """FLOPs of a forward and backward pass over a batch; 0 for a borrowed batch (all counts 0)."""
    if not any(batch.counts.values()):
        return 0.0
    *sources, lengths = [
        np.diff(packed.cu_seqlens) for packed in batch.inputs.values() if isinstance(packed, PackedTokens)
    ]
    return model.train_flops(vocab_size, lengths, len(batch.targets), sources[0] if sources else None)


def usage(device: torch.device, cpu_s: float, elapsed_s: float) -> Row:
    """Average number of busy CPU cores of this process, and its peak memory so far, on host and GPU, in GB (1e9 bytes).

    Args:
        cpu_s: Seconds of CPU time that this process used within `elapsed_s`.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
    row = {"system/cpu_cores": cpu_s / elapsed_s, "system/peak_memory_gb": peak / 1e9}
    if device.type == "cuda":  # the allocator's count does not wait for the device
        row["system/gpu_peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return row
