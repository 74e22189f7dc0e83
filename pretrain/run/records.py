"""The rows that rank 0 writes: metrics.jsonl, launches.jsonl with the durations of a launch's parts, skipped.jsonl."""

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from multihop.common.files import add_path_to_disk_full_error
from multihop.common.gpus import datasheet_rate
from multihop.common.json_lines import Row, append_row
from multihop.common.machine import cpu_model
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.engine.replicas import installed_versions
from multihop.pretrain.environment import TIMES
from multihop.pretrain.run.changes import recorded_part

_PARTS = {
    "detect_s": ("last_row", "ended"),
    "queue_s": ("ended", "requested"),
    "schedule_s": ("requested", "placed"),
}

_ENGINE_KEYS = ("zero_stage", "offload", "compile", "activation_checkpointing", "micro_batch_tokens", "deepspeed")
"""Keys of the section `engine` that may change under a run and decide in which order numbers are summed."""

log = logging.getLogger("multihop")


def metrics_writer(metrics: IO[str], console: IO[str]) -> Callable[[Row], None]:
    """A function that appends rows to metrics.jsonl and prints them to `console`."""

    def emit(row: Row) -> None:
        line = json.dumps({**row, "time": time.time()})
        with add_path_to_disk_full_error(Path(metrics.name)):
            metrics.write(line + "\n")
            metrics.flush()
        print(line, file=console, flush=True)

    return emit


def sync_metrics(metrics: IO[str]) -> None:
    """Sync metrics.jsonl, so that no checkpoint outlives the rows of the steps before it."""
    os.fsync(metrics.fileno())


def skipped_writer(path: Path, batches: BatchBuilder) -> Callable[[int, Row], None]:
    """A function that appends skipped steps to skipped.jsonl, with their samples, losses and gradient norms."""

    def record(step: int, losses: Row) -> None:
        ids = batches.order.samples_of_step(step)
        row = {"step": step, "phase": ids.phase, "samples": ids.samples.tolist()}
        row |= {name: repr(value) for name, value in losses.items()}
        loss, norm = losses["loss"], losses["grad_norm"]
        if loss == norm == 0.0:
            log.warning("skipped step %d: its samples have no token to predict", step)
        else:
            log.warning("skipped step %d: non-finite loss or gradient: loss %s, gradient norm %s", step, loss, norm)
        append_row(path, row)

    return record


class LaunchTimes:
    """The seconds before the first step, by part, in order.

    After a restart: detect_s (from the last row of metrics until the failure was detected) and queue_s (until nodes
    were free). On a cluster: schedule_s (until Ray had placed the ranks) and import_s. Then the parts that `lap` ends.
    """

    def __init__(self) -> None:
        """Create it once this process has imported everything."""
        self._last = time.time()
        times: dict[str, float] = json.loads(os.environ.get(TIMES, "{}"))
        self.seconds: dict[str, float] = {
            part: round(times[stop] - times[start], 3)
            for part, (start, stop) in _PARTS.items()
            if start in times and stop in times
        }
        if "placed" in times:
            self.seconds["import_s"] = round(self._last - times["placed"], 3)

    def lap(self, part: str) -> None:
        """End the part of this name."""
        now = time.time()
        self.seconds[part] = round(now - self._last, 3)
        self._last = now


def append_launch(
    path: Path,
    ranks: Ranks,
    nodes: int,
    launch_id: str,
    step: int,
    rejected: list[str],
    rate: float,
    micro_batch_sizes: list[int],
    config: TrainingConfig,
    times: LaunchTimes,
) -> None:
    """Append this launch to launches.jsonl.

    Args:
        nodes: Number of nodes that the ranks are on.
        launch_id: This launch's random id.
        step: Step of the checkpoint that it resumes from; 0: none.
        rejected: Sentences about newer checkpoints that were rejected.
        rate: Measured floating-point operations per second of a matrix product on this rank's device.
        micro_batch_sizes: Samples of a micro-batch, by phase.
    """
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else cpu_model()
    datasheet = datasheet_rate(device)
    row = {
        "launch_id": launch_id,
        "time": time.time(),
        "step": step,
        "world_size": ranks.world_size,
        "nodes": nodes,
        "host": socket.gethostname(),
        "device": device,
        "threads": torch.get_num_threads(),
        "micro_batch_sizes": micro_batch_sizes,
        "recipe": recorded_part(config),
        "engine": {key: getattr(config.engine, key) for key in _ENGINE_KEYS},
        "deterministic": config.engine.deterministic or ranks.device.type != "cuda",
        "matmul_tflops_per_s": rate / 1e12,
        "datasheet_tflops_per_s": None if datasheet is None else datasheet / 1e12,
        "versions": installed_versions(),
        "rejected": rejected,
        "seconds": times.seconds,
    }
    append_row(path, row)
