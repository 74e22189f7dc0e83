"""Kernel launches, waits of the host, copies and peak memory of an optimizer step, counted without a GPU.

    bench/null_cuda/run.sh bert-large:128 bert-large:128:0.3 gpt2-base:1024 -- --kernels 5

torch's real dispatcher, allocator and choice of kernels run over a CUDA runtime that does nothing but count; see
README.md beside this file. Nothing numerical and no time is measured. Shapes are those of bench/step.py.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC2701 (documented, and nowhere else)

sys.path.insert(0, str(Path(__file__).parents[1]))
from step import case_of
from step_peers import batch_of

COUNTERS = {
    "launches": ("launches", "cu_launches"),
    "matrix products": ("gemm",),
    "waits": ("ssync", "dsync", "esync"),
    "copies to the host": ("d2h",),
    "copies to the device": ("h2d_sync", "h2d_pageable", "h2d_pinned"),
    "copies": ("d2d",),
}


def counts(library: Any) -> dict[str, int]:
    """Return the counts since the last reset."""

    def of(name: str) -> int:
        symbol = name if name.startswith("cu_") else f"nc_{name}"
        found: int = ctypes.c_long.in_dll(driver if name.startswith("cu_") else library, symbol).value
        return found

    driver = ctypes.CDLL("libcuda.so.1")
    return {shown: sum(map(of, names)) for shown, names in COUNTERS.items()}


def most_frequent(library: Any, number: int) -> list[str]:
    """The kernels of the runtime that ran most often since the last reset, without their templates' arguments."""
    with tempfile.NamedTemporaryFile() as file:
        library.nc_dump(file.name.encode())
        lines = sorted(file.read().decode().splitlines(), key=lambda line: -int(line.split("\t")[0]))[:number]
    names = subprocess.run(["c++filt"], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    return [line[:110] for line in names.splitlines()]


def count_step(case: dict[str, Any], settings: dict[str, Any], micro_batches: int, kernels: int) -> dict[str, Any]:
    """Each phase's counts and most frequent kernels in the third step, and the peak of memory in bytes."""
    from multihop.pretrain.config import TrainingConfig
    from multihop.pretrain.engine.engine import Engine
    from multihop.pretrain.engine.ranks import Ranks
    from multihop.pretrain.models.build import build_model, init_weights

    library, driver = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
    config = TrainingConfig.model_validate(
        {
            "model": case["model"],
            "phases": [{"steps": 2, "seq_len": case["length"], "global_batch_size": case["sequences"]}],
            "engine": {"deepspeed": {}, "precision": "bf16", **settings},
        }
    )
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    model = build_model(config.model, case["vocabulary"])
    init_weights(model, 1)
    engine = Engine(config, model.to(ranks.device), ranks, case["sequences"])
    batch = batch_of(case)
    totals = {name: float(count) * micro_batches for name, count in batch.counts.items()}
    phases: dict[str, dict[str, int]] = {}
    frequent: dict[str, list[str]] = {}

    def counted(name: str, work: Any) -> None:
        library.nc_reset()
        driver.cu_reset()
        work()
        found = counts(library)
        frequent[name] = most_frequent(library, kernels)
        phases[name] = {key: phases.get(name, {}).get(key, 0) + value for key, value in found.items()}

    for _ in range(3):
        phases.clear()
        torch.cuda.reset_peak_memory_stats()
        for number in range(micro_batches):
            torch.manual_seed(number)
            counted("forward and backward", lambda: engine.forward_backward(batch, totals))
        counted("update", lambda: engine.step(1e-4))
    phases["step"] = {key: sum(phase[key] for phase in phases.values()) for key in COUNTERS}
    return {"phases": phases, "kernels": frequent, "peak_bytes": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="MODEL:LENGTH[:PADDING]")
    parser.add_argument("--tokens", type=int, default=65_536, help="of a micro-batch, with padding")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--engine", type=json.loads, default={}, help="engine section of a recipe, as JSON")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list each phase's most frequent kernels")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.precision, arguments.threads, arguments.compile = "bf16", 1, False
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN asks the device; FlashAttention has as many launches
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    case = case_of(arguments.shape, arguments)
    found = count_step(case, arguments.engine, arguments.micro_batches, arguments.kernels)
    print(f"{case['shape']}, {found['peak_bytes'] / 1e9:.1f} GB at most")
    print(f"{'':22}" + "".join(f"{name:>22}" for name in COUNTERS))
    for name, row in found["phases"].items():
        print(f"{name:22}" + "".join(f"{row[key]:22,}" for key in COUNTERS))
        for line in found["kernels"].get(name, ()):
            print(f"    {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "case": case, **found}, indent=1))


if __name__ == "__main__":
    main()
