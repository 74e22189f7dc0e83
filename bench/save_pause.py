"""Measure how long an asynchronous save stops training, next to a synchronous one: `python bench/save_pause.py`.

An asynchronous save costs its copy; a synchronous one is the same call, followed by waiting for the commit. Both are
measured in turn on a state of BERT-base's size (weights and two moments in fp32), together with the limits: copying
as many bytes from memory to memory on this machine, and writing them to its disk with an fsync.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from multihop.pretrain.checkpoint.manifest import CheckpointManifest
from multihop.pretrain.checkpoint.writer import CheckpointWriter

KINDS = ("weight", "exp_avg", "exp_avg_sq")
RUN = "b" * 32
"""An id that no run has, because retention removes the checkpoints of a run."""
TENSORS = 200
"""Number of tensors, about that of BERT-base."""


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=110_000_000, help="of the model; each takes 12 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, default=Path("bench/results/save_pause.json"))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="save-pause-", dir=options.folder))
    try:
        results = [measure(folder, ranks, options.parameters, options.repeats) for ranks in (1, 2)]
    finally:
        shutil.rmtree(folder)
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}",
        "parameters": options.parameters,
        "repeats": options.repeats,
        "results": results,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['machine']}; {12 * options.parameters / 1e9:.2f} GB a checkpoint; medians of {options.repeats}")
    columns = {
        "ranks": "ranks",
        "pause_s": "pause of an asynchronous save, s",
        "first_pause_s": "the first one, without prepare(), s",
        "synchronous_s": "synchronous save, s",
        "pause_of_synchronous": "pause / synchronous",
        "copy_gb_per_s": "copy in the pause, GB/s",
        "copy_limit_gb_per_s": "limit: memory to memory, GB/s",
        "write_gb_per_s": "synchronous save, GB/s",
        "write_limit_gb_per_s": "limit: write and fsync, GB/s",
    }
    for key, title in columns.items():
        print(f"{title:40s}" + "".join(f"{result[key]:>12.4g}" for result in results))


def measure(folder: Path, ranks: int, parameters: int, repeats: int) -> dict[str, float]:
    """Return the medians over `repeats` of each kind of save, in turn, by `ranks` threads that save a rank each."""
    states = [state_of(parameters // ranks, rank) for rank in range(ranks)]
    writers = [
        CheckpointWriter(str(folder / f"{ranks}-ranks"), rank, ranks, f"{RUN[:8]}-bench", keep=1)
        for rank in range(ranks)
    ]
    total, step = sum(tensor.nbytes for state in states for tensor in state.values()), 0
    threads = ThreadPoolExecutor(ranks)

    def save(wait: bool) -> tuple[float, float]:
        """Return the seconds of the longest pause of any rank, and the seconds until all ranks return."""
        nonlocal step
        step += 1
        manifest = CheckpointManifest(
            run=RUN,
            step=step,
            tokens=0,
            updates=step,
            world_size=ranks,
            zero_stage=1,
            parameters={f"p{number}": [parameters // ranks // TENSORS * ranks] for number in range(TENSORS)},
            data_fingerprint="bench",
        )

        def one(rank: int) -> None:
            writers[rank].save(states[rank], manifest)
            if wait:
                writers[rank].wait()

        started = time.perf_counter()
        list(threads.map(one, range(ranks)))
        seconds = time.perf_counter() - started
        for writer in writers:
            writer.wait()
        return max(writer.last_pause_s for writer in writers), seconds

    first_pause, _ = save(wait=False)
    pauses, synchronous, copies, writes = [], [], [], []
    for _ in range(repeats):
        pauses.append(save(wait=False)[0])
        synchronous.append(save(wait=True)[1])
        copies.append(copy_seconds(states))
        writes.append(write_seconds(folder / "limit", states))
    pause, whole = statistics.median(pauses), statistics.median(synchronous)
    return {
        "ranks": ranks,
        "bytes": total,
        "pause_s": pause,
        "first_pause_s": first_pause,
        "synchronous_s": whole,
        "pause_of_synchronous": pause / whole,
        "copy_gb_per_s": total / pause / 1e9,
        "copy_limit_gb_per_s": total / statistics.median(copies) / 1e9,
        "write_gb_per_s": total / whole / 1e9,
        "write_limit_gb_per_s": total / statistics.median(writes) / 1e9,
        "pauses_s": pauses,
        "synchronous_saves_s": synchronous,
    }


def state_of(parameters: int, rank: int) -> dict[str, Tensor]:
    """Return named slices of `parameters` weights and their moments, in flat buffers as the optimizer has them."""
    state, numel = {}, parameters // TENSORS
    for kind in KINDS:
        flat = torch.rand(parameters)
        for number in range(TENSORS):
            state[f"{kind}/p{number}@{rank * numel}"] = flat[number * numel : (number + 1) * numel]
    return state


def copy_seconds(states: list[dict[str, Tensor]], blocks: int = 8) -> float:
    """Return the seconds of copying as many bytes in large blocks, between memory that was touched before."""
    length = sum(tensor.numel() for state in states for tensor in state.values()) // blocks
    source, target = torch.rand(length), torch.zeros(length)
    started = time.perf_counter()
    for _ in range(blocks):
        target.copy_(source)
    return time.perf_counter() - started


def write_seconds(path: Path, states: list[dict[str, Tensor]]) -> float:
    """Return the seconds of writing the same bytes into one new file, with an fsync."""
    started = time.perf_counter()
    with open(path, "wb") as file:
        for state in states:
            for tensor in state.values():
                file.write(tensor.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


if __name__ == "__main__":
    main()
