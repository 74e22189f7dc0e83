"""Count how often a training step makes the host wait for the device, on a machine that has no device.

Tensors that are computed from weights, gradients or the optimizer's state stand in for tensors on the device; tensors
that were copied to the host do not. On a device the host waits when it reads a value (item(), tolist(), bool(), cpu(),
a shape that depends on values), when it uploads a value with torch.tensor(..., device=...), and in synchronize().
"""

import gc
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rank_jobs import run_worker
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented, and nowhere else)

from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.run import train_run

_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select"}


class DeviceReads(TorchDispatchMode):
    """Counts reads, uploads, calls of synchronize, and collectives by name in `counts` while it is active."""

    def __init__(self, on_device: Iterable[Tensor]) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self._on_device: dict[int, torch.UntypedStorage] = {}
        """Storages by address, kept alive so that no other storage gets the same address."""
        self._counting = True
        self._mark(on_device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        if self._counting and any(map(self._is_on_device, _tensors((args, kwargs)))):
            self.counts["reads"] += func._opname in _READS
            self._mark(_tensors(out))
            if func._schema.is_mutable:
                arguments = zip(func._schema.arguments, args, strict=False)
                written = [value for argument, value in arguments if argument.is_write or func.namespace == "c10d"]
                self._mark(_tensors(written))
        return out

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Activate it, and also count what does not pass through torch's dispatcher."""
        from deepspeed import get_accelerator

        make = torch.tensor

        def tensor(*args: Any, **kwargs: Any) -> Tensor:
            self.counts["uploads"] += kwargs.get("device") is not None
            return make(*args, **kwargs)

        def synchronize(*_: Any) -> None:
            self.counts["synchronize"] += 1

        replaced = {name: self._reading(getattr(Tensor, name)) for name in ("cpu", "tolist", "numpy")}
        of_deepspeed = patch.object(get_accelerator(), "synchronize", synchronize)
        with patch.multiple(Tensor, **replaced), patch.object(torch, "tensor", tensor), of_deepspeed, self:
            yield

    def _reading(self, method: Any) -> Any:
        def read(tensor: Tensor, *args: Any) -> Any:
            if not self._counting or not self._is_on_device(tensor):
                return method(tensor, *args)
            self.counts["reads"] += 1
            self._counting = False
            try:
                value = method(tensor, *args)
                return value.clone() if isinstance(value, Tensor) else value
            finally:
                self._counting = True

        return read

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for each in tensors:
            if each.layout == torch.strided:  # others have no storage
                storage = each.untyped_storage()
                self._on_device[storage._cdata] = storage

    def _is_on_device(self, tensor: Tensor) -> bool:
        return tensor.layout != torch.strided or tensor.untyped_storage()._cdata in self._on_device


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


def reads_of_steps(ranks: Ranks, run_dir: Path) -> list[dict[str, int]]:
    """Run the worker; returns the counts of each step, from the end of the update before it to the end of its own."""
    steps: list[dict[str, int]] = []
    train, step = train_run.train, Engine.step

    def counted_train(engine: Engine, *args: Any) -> bool:
        gc.collect()  # an earlier test's engine reads its device when it is collected
        reads = DeviceReads(_on_device(engine))

        def counted_step(self: Engine, lr: float) -> Any:
            result = step(self, lr)
            steps.append(dict(reads.counts))
            reads.counts.clear()
            return result

        with patch.object(Engine, "step", counted_step), reads.patched():
            finished = train(engine, *args)
        steps.append(dict(reads.counts))
        return finished

    with patch.object(train_run, "train", counted_train):
        assert run_worker(ranks, run_dir) == 0
    return steps


def _on_device(engine: Engine) -> Iterator[Tensor]:
    for parameter in engine.module.parameters():
        yield parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor.data
    for group in engine._optimizer.param_groups:
        for flat in group["params"]:
            yield flat
            yield from (each for name, each in engine._optimizer.state[flat].items() if name != "step")


def write_recipe(run_dir: Path, data: Path, content: dict[str, Any]) -> Path:
    """Make a run directory for `reads_of_steps`."""
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "data").symlink_to(data)
    (run_dir / "recipe.json").write_text(json.dumps(content))
    return run_dir
