"""Measure what comparing the replicas costs: python bench/replica_check.py

Two ranks train a BERT-base over gloo, and compare the checksums of its weights after each step. A step and a check take
turns; the ratio is of their medians. On GPUs both ranks need one.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from multihop.common.machine import cpu_model
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import join_process_group
from multihop.pretrain.engine.replicas import check_replicas
from multihop.pretrain.environment import SECRET
from multihop.pretrain.models.build import build_model_on_meta, make_param_init
from multihop.pretrain.plan.assumed_batch import assumed_batch

RANKS, VOCABULARY, PORT = 2, 30522, "29671"


def train(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    """A rank; rank 0 puts the seconds of steps and of checks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT, SECRET: "5" * 64}
    torch.set_num_threads(1)
    ranks = join_process_group()
    config = TrainingConfig.model_validate(
        {
            "model": {"preset": "bert-base"},
            "objective": {"name": "mlm"},
            "phases": [{"steps": 2, "seq_len": 128, "global_batch_size": RANKS * arguments.samples}],
            "engine": {"deepspeed": {}, "zero_stage": arguments.stage, "precision": arguments.precision},
        }
    )
    model = build_model_on_meta(config.model, VOCABULARY)
    engine = Engine(config, model, ranks, arguments.samples, make_param_init(model, 1))
    batch = assumed_batch(config, 0, arguments.samples, VOCABULARY)
    counts = {name: float(count * RANKS) for name, count in batch.counts.items()}
    steps, checks = [], []
    for number in range(arguments.repeats + 1):
        started = time.perf_counter()
        engine.forward_backward(batch, counts)
        engine.step(1e-4)
        between = time.perf_counter()
        check_replicas(ranks, engine.replicated_tensors(), {}, number)
        ended = time.perf_counter()
        if number:  # the first one allocates
            steps.append(between - started)
            checks.append(ended - between)
    if rank == 0:
        results.put((steps, checks))
    ranks.broadcast(0)
    engine.destroy()
    ranks.shutdown()


def main() -> None:
    """Print the medians and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="of a rank's step, of 128 tokens each")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/replica_check.json"))
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=train, args=(rank, arguments, results)) for rank in range(RANKS)]
    for each in processes:
        each.start()
    steps, checks = results.get()
    for each in processes:
        each.join()
    step, check = statistics.median(steps), statistics.median(checks)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_model()
    report = {
        "date": date.today().isoformat(),
        "device": device,
        "stage": arguments.stage,
        "samples": arguments.samples,
        "steps_s": steps,
        "checks_s": checks,
        "ratio": check / step,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{device}, {RANKS} ranks, ZeRO stage {arguments.stage}, BERT-base, {arguments.samples} x 128 tokens a rank")
    print(f"a check takes {check:.3f} s, a step {step:.3f} s: {check / step:.2%} of a step")
    print(f"with a check each 200 steps, {check / step / 200:.4%} of the training")


if __name__ == "__main__":
    main()
