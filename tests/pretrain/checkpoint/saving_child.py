"""Save checkpoints in FOLDER forever, as two ranks would, in processes that are meant to be killed.

    python saving_child.py FOLDER

Each line on standard input starts a process, a fork of this one, so that torch is imported once. "pid N", "saved STEP"
and "ended" are printed to standard output.
"""

import os
import sys
from pathlib import Path

import torch

from multihop.pretrain.checkpoint.manifest import CheckpointManifest, folder_of_step
from multihop.pretrain.checkpoint.retention import sweep
from multihop.pretrain.checkpoint.verify import load_weights, newest_good
from multihop.pretrain.checkpoint.writer import CheckpointWriter

SHAPES = {"a": [200_000], "b": [7]}
KEEP = 3
RUN = "5" * 32


def content(step: int) -> dict[str, torch.Tensor]:
    """Return what the checkpoint of a step must hold."""
    return {name: torch.arange(shape[0], dtype=torch.float32) * (step % 97 + 1) for name, shape in SHAPES.items()}


def is_right(checkpoints: str, step: int) -> bool:
    """Return whether the checkpoint of a step holds `content(step)`."""
    weights = load_weights(folder_of_step(checkpoints, step))
    return all(torch.equal(weights[name], tensor) for name, tensor in content(step).items())


def save_for_ever(checkpoints: str) -> None:
    """Resume from the newest good checkpoint as one launch, and report each checkpoint when it is committed."""
    found, _ = newest_good(checkpoints)
    step = found.step if found else 0
    launch = f"{RUN[:8]}-{os.getpid():x}"
    sweep(checkpoints, found.step if found else None, launch)
    writers = [CheckpointWriter(checkpoints, rank, 2, launch, KEEP, keep_every=50) for rank in (0, 1)]
    while True:
        step += 1
        whole = content(step)
        manifest = CheckpointManifest(
            run=RUN,
            step=step,
            tokens=step,
            updates=step,
            world_size=2,
            zero_stage=1,
            parameters=SHAPES,
            data_fingerprint="d",
        )
        for rank, writer in enumerate(writers):
            live = {}
            for name, tensor in whole.items():
                start, stop = (tensor.numel() * r // 2 for r in (rank, rank + 1))
                live[f"weight/{name}@{start}"] = tensor[start:stop]
            writer.save(live, manifest)
        writers[1].wait()  # returns at the commit; rank 0 may still be removing what is old
        _tell(f"saved {step}")


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main() -> None:
    """Start one fork after the other."""
    torch.set_num_threads(1)
    checkpoints = str(Path(sys.argv[1]))
    while sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            save_for_ever(checkpoints)
        _tell(f"pid {pid}")
        os.waitpid(pid, 0)
        _tell("ended")


if __name__ == "__main__":
    main()
