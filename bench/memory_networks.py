"""Measure speed and peak memory of training memory networks on bAbI beside a plain loop over torch's modules.

    python bench/memory_networks.py tasks_1-20_v1-1/en --tasks 1 3 --json FILE

Both train ten networks from new weights for an epoch, with softmax, by the published settings, and then answer the
training questions: ours all at once, the plain loop one after another. Each runs in its own process, which gives each
its own peak memory; they take turns.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from step import measure, print_profiles, write_report
from step_peers import Case, Stepper, import_optimizers, peer_process, reset_peak_memory


def _stories(case: Case) -> Any:
    from multihop.eval.memory_network.stories import encode_stories, vocabulary
    from multihop.eval.tasks.babi import read_questions, task_files

    questions, _ = read_questions(task_files(Path(case["folder"]), case["task"])[0], case["task"])
    words = vocabulary(questions)
    return encode_stories(questions, words, _settings().memory_size), len(words) + 1


def _settings() -> Any:
    from multihop.eval.memory_network.training import TrainingSettings

    return TrainingSettings(linear_epochs=0, epochs=1, validation=0.0)


def ours(case: Case) -> Stepper:
    """Return a function that trains all networks for an epoch."""
    from multihop.eval.memory_network.training import train_networks

    stories, words = _stories(case)
    reset_peak_memory()

    def step() -> None:
        train_networks(stories, words, _settings(), seed=1)

    return step


def plain(case: Case) -> Stepper:
    """Return the same in a loop over single networks."""
    import torch
    from plain_memory_network import PlainMemoryNetwork

    stories, words = _stories(case)
    settings = _settings()
    sentences = torch.from_numpy(stories.sentences)
    memories, asked = sentences[stories.memories], sentences[stories.questions]
    answers, sizes = torch.from_numpy(stories.answers), torch.from_numpy(stories.sizes)
    shape = min(settings.memory_size, int(sizes.max())), memories.shape[2]
    import_optimizers()
    reset_peak_memory()

    def step() -> None:
        for _ in range(settings.restarts):
            network = PlainMemoryNetwork(words, settings.width, settings.hops, shape, settings.times)
            optimizer = torch.optim.SGD(network.parameters(), settings.lr)
            for batch in torch.randperm(len(answers)).split(settings.batch_size):
                longest = int(sizes[batch].max())
                logits = network(memories[batch, :longest], asked[batch])
                torch.nn.functional.cross_entropy(logits, answers[batch], reduction="sum").backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), settings.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            with torch.inference_mode():
                for batch in torch.arange(len(answers)).split(256):
                    network(memories[batch, : int(sizes[batch].max())], asked[batch]).argmax(-1)

    return step


PEERS = {"ours": ours, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the directory `en` of bAbI, version 1.1")
    parser.add_argument("--tasks", nargs="+", type=int, default=[1, 3])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print each peer's most expensive operations")
    parser.add_argument("--verbose", action="store_true", help="show the peers' output")
    parser.add_argument("--json", type=Path, default=Path("bench/results/memory_networks.json"))
    arguments = parser.parse_args()
    import torch

    from multihop.pretrain.engine.device import matmul_rate

    torch.set_num_threads(arguments.threads)
    rate = matmul_rate(torch.device("cpu"), torch.float32)
    print("an epoch of ten networks: seconds of ours, speed and memory beside single networks in a plain loop")
    results = []
    for task in arguments.tasks:
        case = {"folder": str(arguments.folder.resolve()), "task": task, "threads": arguments.threads}
        found = measure(case, list(PEERS), __file__, arguments)
        ratios = np.sort(np.divide(found["seconds"]["plain"], found["seconds"]["ours"]))
        memory = found["peak_bytes"]["ours"] / found["peak_bytes"]["plain"]
        results.append({"case": case, "speed": float(np.median(ratios)), "memory": memory, **found})
        seconds = statistics.median(found["seconds"]["ours"])
        print(
            f"task {task:2} {seconds:6.2f} s  {np.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
            f"mem {memory:.2f}",
            flush=True,
        )
        print_profiles(found)
    write_report(arguments.json, rate, results)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in PEERS:
        peer_process(sys.argv[1], PEERS)
    else:
        main()
