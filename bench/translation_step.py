"""Measure speed and peak memory of an optimizer step of an encoder-decoder (translation) model: ours, and its peer.

    python bench/translation_step.py --models transformer-base lstm --json FILE

The peer of a transformer is transformers' MarianMTModel in its Trainer's loop, on a batch of its collator and with its
label smoothing; that of an LSTM is a plain loop over torch.nn.LSTM, or with input feeding over torch.nn.LSTMCell. Each
runs in its own process, which gives each its own peak memory; they take turns, one step each. All use the same pairs,
torch, threads, AdamW (fused), clipping, dropout and label smoothing. Tokens are those of both sides without padding.
"""

import argparse
import os
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import translation_step_peers
from step import measure, print_profiles, write_report
from step_peers import Case
from translation_step_peers import lengths_of_pairs

_LSTM = {"family": "seq2seq", "cell": "lstm", "layers": 2, "hidden": 512, "max_positions": 512, "dropout": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "transformer-base": {"preset": "transformer-base"},
    "transformer-mini": {"preset": "transformer-mini"},
    "lstm": {**_LSTM, "attention": "none"},
    "lstm-attention": {**_LSTM, "attention": "general"},
    "lstm-feeding": {**_LSTM, "attention": "general", "input_feeding": True},
}


def case_of(model: str, arguments: argparse.Namespace) -> Case:
    """Return a peer's input, which is sent to it as JSON."""
    return {
        "model": MODELS[model],
        "vocabulary": arguments.vocabulary,
        "length": arguments.length,
        "padding": arguments.padding,
        "sequences": arguments.pairs,
        "precision": "fp32",
        "threads": arguments.threads,
        "compile": False,
        "seed": 1,
    }


def row_of(name: str, case: Case, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return the ratios of a case; ratios of times are medians over the turns."""
    from multihop.pretrain.models.families import parse_model_config

    model, (sources, targets) = parse_model_config(case["model"]), lengths_of_pairs(case)
    needed = model.train_flops(case["vocabulary"], targets, int(targets.sum()), sources)
    full = np.full(len(sources), case["length"])
    (_, mine), (peer, theirs) = found["seconds"].items()
    ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
    return {
        "model": name,
        "peer": peer,
        "tokens_per_s": int(sources.sum() + targets.sum()) / statistics.median(mine),
        "share_of_matmul_rate": needed / statistics.median(mine) / rate,
        "ratio_by_flops": model.train_flops(case["vocabulary"], full, int(full.sum()), full) / needed,
        "speed": statistics.median(ratios),
        "speed_from_to": [ratios[0], ratios[-1]],
        "cpu_time": statistics.median(
            b / a for a, b in zip(found["cpu_seconds"]["ours"], found["cpu_seconds"][peer], strict=True)
        ),
        "memory": found["peak_bytes"]["ours"] / found["peak_bytes"][peer],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if "mini" not in name])
    parser.add_argument("--pairs", type=int, default=64, help="of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=64, help="tokens of the longest side (default: %(default)s)")
    parser.add_argument("--padding", type=float, default=0.3, help="its share of a padded batch (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=32000, help="joint (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print each peer's most expensive operations")
    parser.add_argument("--verbose", action="store_true", help="show the peers' output")
    parser.add_argument("--json", type=Path, default=Path("bench/results/translation_step.json"))
    arguments = parser.parse_args()
    if any(name.startswith("transformer") for name in arguments.models) and find_spec("transformers") is None:
        raise SystemExit("the transformer's peer needs transformers; install it, or measure --models lstm alone")

    import torch

    from multihop.pretrain.engine.device import matmul_rate

    torch.set_num_threads(arguments.threads)
    rate = matmul_rate(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    print(f"torch {torch.__version__}, {arguments.threads} threads, matrix products {rate / 1e9:,.0f} GFLOP/s")
    print(f"{'model':16} {'tokens/s':>8} {'of matmul':>9} {'by FLOPs':>8}  speed, CPU time and memory beside its peer")
    results = []
    for name in arguments.models:
        case = case_of(name, arguments)
        peer = "hugging_face" if name.startswith("transformer") else "torch_lstm"
        found = measure(case, ["ours", peer], translation_step_peers.__file__, arguments)
        row = row_of(name, case, found, rate)
        results.append({**row, **found, "case": case})
        print(
            f"{name:16} {row['tokens_per_s']:8,.0f} {row['share_of_matmul_rate']:9.0%} {row['ratio_by_flops']:8.2f}  "
            f"{peer} {row['speed']:.2f}x ({row['speed_from_to'][0]:.2f}-{row['speed_from_to'][1]:.2f}) "
            f"CPU {row['cpu_time']:.2f}x mem {row['memory']:.2f}",
            flush=True,
        )
        print_profiles(found)
    write_report(arguments.json, rate, results)


if __name__ == "__main__":
    main()
