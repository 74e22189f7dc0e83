"""Measure what ranks send each other in a step, beside what `multihop plan` predicts: `python bench/wire_bytes.py`.

Ranks over gloo train a small GPT-2 in a network namespace of their own (which needs root), whose loopback interface
counts bytes, headers included.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported

import torch
import torch.distributed as dist

from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks
from multihop.pretrain.models.build import build_model_on_meta, make_param_init
from multihop.pretrain.plan.assumed_batch import assumed_batch
from multihop.pretrain.plan.rank_trace import trace_rank

VOCABULARY, SAMPLES, WARM_UP, STEPS = 1_000, 2, 2, 3
PORT = "29511"


def config_of(stage: int, world_size: int) -> TrainingConfig:
    return TrainingConfig.model_validate(
        {
            "seed": 1,
            "model": {"family": "gpt2", "layers": 4, "hidden": 256, "heads": 4, "max_positions": 64, "dropout": 0.0},
            "objective": {"name": "clm"},
            "phases": [{"seq_len": 64, "global_batch_size": SAMPLES * world_size, "steps": 9}],
            "engine": {"micro_batch_size": SAMPLES, "precision": "fp32", "zero_stage": stage},
        }
    )


def predict(stage: int, world_size: int) -> int:
    """Bytes that a rank sends in a step."""
    config = config_of(stage, world_size)
    batch = assumed_batch(config, 0, SAMPLES, VOCABULARY)
    trace = trace_rank(config, VOCABULARY, None, [batch], SAMPLES, world_size, "cpu")
    step = trace.micro_batches[0] + trace.update
    return sum(count * each.bytes for each, count in step.items() if each.kind == "communication")


def sent_bytes() -> int:
    """Bytes that this network namespace has sent on its loopback interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.lstrip().startswith("lo:")).partition(":")[2].split()
    return int(fields[8])


def train(rank: int, stage: int, world_size: int, results: Any) -> None:
    """A rank; rank 0 puts the bytes that all ranks sent in a step."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = config_of(stage, world_size)
    model = build_model_on_meta(config.model, VOCABULARY)
    batch = assumed_batch(config, 0, SAMPLES, VOCABULARY)
    counts = {name: float(count * world_size) for name, count in batch.counts.items()}
    engine = Engine(config, model, Ranks(rank, world_size, torch.device("cpu")), SAMPLES, make_param_init(model, 1))
    before = 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            dist.barrier()
            before = sent_bytes()
            dist.barrier()
        engine.forward_backward(batch, counts)
        engine.step(1e-3)
    dist.barrier()
    if rank == 0:
        results.put((sent_bytes() - before) / STEPS)
    dist.barrier()
    engine.destroy()


def measure(stage: int, world_size: int) -> float:
    """Bytes that a rank sends in a step."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=train, args=(rank, stage, world_size, results)) for rank in range(world_size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
        assert each.exitcode == 0, f"a rank ended with {each.exitcode}"
    sent: float = results.get()
    return sent / world_size


def alone(*arguments: str) -> float:
    """The last line that this script prints with other arguments, in a process and a network namespace of its own."""
    command = ["unshare", "--net", sys.executable, __file__, *arguments]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("bench/results/wire_bytes.json"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--part", nargs=3, metavar=("predict|measure", "STAGE", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        name, stage, world_size = options.part
        if name == "measure":
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        print((predict if name == "predict" else measure)(int(stage), int(world_size)))
        return
    rows = []
    print("| ZeRO | ranks | predicted, MB | sent, MB | sent / predicted |\n|---|---|---|---|---|")
    for stage in range(4):
        for world_size in options.ranks:
            predicted, sent = (alone("--part", name, str(stage), str(world_size)) for name in ("predict", "measure"))
            rows.append({"stage": stage, "ranks": world_size, "predicted": predicted, "sent": sent})
            print(
                f"| {stage} | {world_size} | {predicted / 1e6:.2f} | {sent / 1e6:.2f} | {sent / predicted:.3f} |",
                flush=True,
            )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
