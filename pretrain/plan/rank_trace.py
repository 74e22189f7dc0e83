"""One rank of a training run before it starts: its memory and operations, by running its code without data.

The model, DeepSpeed and the optimizer are those of a training run, on the meta device (`MetaTrace`) and with a process
group in which the other ranks do not exist: its collectives return at once. So what DeepSpeed allocates in each ZeRO
stage is not repeated here as formulas.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves  # noqa: PLC2701

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.device_type import DeviceType, plan_for
from multihop.pretrain.engine.deepspeed_internals import destroy_process_group, simulate_gpu, tensors_on_meta
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.inputs import to_device
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import build_model_on_meta
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.models.gpu.kernel import observe_launches
from multihop.pretrain.models.layers.cached_tables import clear_cached_tables
from multihop.pretrain.objectives.batch import Batch
from multihop.pretrain.plan.memory_categories import CATEGORIES, Activity, lasting_tensors
from multihop.pretrain.plan.meta_kernels import meta_kernels
from multihop.pretrain.plan.meta_trace import GPU_BLOCK, MetaTrace
from multihop.pretrain.plan.operations import Operation, describe, describe_kernel

_LR = 1e-3
_COPIES = (torch.ops.aten.copy_, torch.ops.aten._to_copy)


@dataclass
class HostTraffic:
    """What a rank's part of a step does in the host's memory if something is offloaded."""

    copied: int = 0
    """Bytes that are copied between the GPU and the host."""
    accessed: int = 0
    """Bytes that the host's CPU reads and writes."""


@dataclass(frozen=True)
class RankTrace:
    """Bytes on a rank's GPU, and in the host's memory for this rank where something is offloaded; and operations."""

    between_steps: dict[str, int]
    """What is there all the time: weights, optimizer state, and what DeepSpeed keeps; "device" and "host"."""
    peaks: dict[str, dict[str, int]]
    """The largest bytes of each part of a step: "backward" (forward and backward passes), and "update"."""
    categories: dict[str, dict[str, int]]
    """Peak bytes on the GPU by category (see `Category`), for each part of a step; the categories sum to the peak."""
    micro_batches: list[Counter[Operation]]
    """The operations on the GPU of each micro-batch; gradients may be reduced with the last one alone."""
    update: Counter[Operation]
    """Those of the update."""
    evaluation: Counter[Operation]
    """Those of a forward pass over the last micro-batch, without dropout and gradients."""
    host_micro_batches: list[HostTraffic]
    """Of each micro-batch."""
    host_update: HostTraffic
    """Of the update."""
    host_evaluation: HostTraffic
    """Of the forward pass without gradients."""

    @property
    def peak(self) -> int:
        """The largest bytes on the GPU."""
        return max(parts["device"] for parts in self.peaks.values())

    @property
    def peak_by_category(self) -> dict[str, int]:
        """Peak bytes on the GPU by category."""
        return self.categories[max(self.peaks, key=lambda part: self.peaks[part]["device"])]


@contextmanager
def simulated_ranks(world_size: int) -> Iterator[Ranks]:
    """Rank 0 of a process group whose other ranks do not exist, and whose collectives change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}  # DeepSpeed reads them
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield Ranks(0, world_size, torch.device("meta"))
    finally:
        destroy_process_group()


@contextmanager
def _frozen_existing_objects() -> Iterator[None]:
    """Exclude existing objects, mostly libraries, from garbage collection: traversing them takes longer than tracing a
    small model."""
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()  # the engine, before the next trace freezes it
        if not was_frozen:
            gc.unfreeze()


@_frozen_existing_objects()
def trace_rank(
    config: TrainingConfig,
    vocab_size: int,
    source_vocab_size: int | None,
    batches: list[Batch],
    micro_batch_size: int,
    world_size: int,
    device: DeviceType = "cuda",
) -> RankTrace:
    """A step of rank 0 of a run.

    Args:
        batches: The micro-batches of a step, of at most `micro_batch_size` samples each.
        device: The type of the device that computes.
    """
    clear_cached_tables()  # those of an earlier trace would not be counted in this one
    model = build_model_on_meta(config.model, vocab_size, source_vocab_size)
    activity = Activity(vocab_size, FAMILIES[config.model.family].uses_ctc)
    counts = {name: float(sum(batch.counts[name] for batch in batches)) for name in batches[0].counts}
    current: Counter[Operation] = Counter()
    on_host, accumulating = HostTraffic(), False

    def record(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        described = describe(operation, args, kwargs, result, world_size)
        if described is not None:
            current[described] += 1
            if described.kind == "communication":
                for leaf in tree_leaves(args):
                    if isinstance(leaf, Tensor):
                        trace.set_category(leaf, "communication", ("workspace", "activations"))

    def record_on_host(operation: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        described = describe(operation, args, kwargs, result, world_size)
        if described is None or described.kind == "communication":
            return
        if operation.overloadpacket in _COPIES:
            target, source = (args[0], args[1]) if operation.overloadpacket is _COPIES[0] else (result, args[0])
            if _share_memory(target, source):  # the copy back below, which is counted there
                return
            if trace.is_on_host(target) != trace.is_on_host(source):
                # A copy to the GPU has the dtype of its result, and one from the GPU that of its source: torch converts
                # on the host (aten/src/ATen/native/cuda/Copy.cu).
                sent = source if trace.is_on_host(target) else target
                on_host.copied += sent.numel() * sent.itemsize
                if accumulating and config.engine.zero_stage == 3 and trace.is_on_host(target):
                    # DeepSpeed then copies the gradients to the GPU again, which does nothing on the meta device.
                    on_host.copied += target.numel() * target.itemsize
                return
        on_gpu = len(args) > 1 and isinstance(args[1], Tensor) and not trace.is_on_host(args[1])
        if accumulating and operation.overloadpacket is torch.ops.aten.add_ and on_gpu:
            # DeepSpeed copies gradients in the host's memory to the GPU, adds to them there, and copies them back. On
            # the meta device the former does nothing.
            on_host.copied += 2 * args[0].numel() * args[0].itemsize
            return
        on_host.accessed += described.bytes

    def record_kernel(kernel: Any, args: Sequence[Any]) -> None:
        current[describe_kernel(kernel, args)] += 1

    with (
        simulated_ranks(world_size) as ranks,
        simulate_gpu(),
        plan_for(device),
        meta_kernels(),
        observe_launches(record_kernel),
        activity.observed(model),
        MetaTrace(device, GPU_BLOCK if device == "cuda" else 1, record, activity.category_of, record_on_host) as trace,
    ):
        engine = Engine(config, model, ranks, micro_batch_size)
        trace.forget(tensors_on_meta(engine.zero))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: trace.set_category(gradient, "gradients"))
        peaks: dict[str, dict[str, int]] = {}
        categories: dict[str, dict[str, int]] = {}

        def note_categories() -> None:
            for category, tensor in lasting_tensors(engine, config.engine.zero_stage):
                trace.set_category(tensor, category)

        def note_peak(part: str) -> None:
            found = trace.peak_by_category("device")
            peaks[part], categories[part] = dict(trace.peak), {name: found[name] for name in CATEGORIES}
            gc.collect()
            trace.set_category_of_new("buffers", instead_of="activations")  # tables that a forward pass has cached
            trace.reset_peak()

        for step in (batches[:1], batches):  # the first step allocates what all later ones find
            gc.collect()
            trace.reset_peak()
            between = dict(trace.bytes)
            parts: list[Counter[Operation]] = []
            host_parts: list[HostTraffic] = []
            for batch in step:
                current, on_host, accumulating = Counter(), HostTraffic(), True
                parts.append(current)
                host_parts.append(on_host)
                engine.forward_backward(batch, counts)
                note_categories()
                # What else the backward pass leaves is gradients, also where DeepSpeed has copied or summed them.
                trace.set_category_of_new("gradients", instead_of="workspace")
            note_peak("backward")
            current, on_host, accumulating = Counter(), HostTraffic(), False
            engine.step(_LR)
            note_categories()
            note_peak("update")
        update, host_update = current, on_host
        current, on_host = Counter(), HostTraffic()
        _evaluate(engine, batches[-1])
        engine.destroy()
    return RankTrace(between, peaks, categories, parts, update, current, host_parts, host_update, on_host)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


@torch.no_grad()
def _evaluate(engine: Engine, batch: Batch) -> None:
    """A forward pass as in `Engine.evaluate`, which reads the sums of the losses."""
    engine.module.eval()
    engine.module(**to_device(batch.inputs, engine.ranks.device))
