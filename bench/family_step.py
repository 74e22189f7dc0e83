"""Measure speed and peak memory of an optimizer step of a bag, a biLM, an AWD-LSTM, XLNet or a CTC encoder.

    python bench/family_step.py --models bag bilm awd-lstm xlnet ctc --json FILE

The peer is a plain loop over torch's modules, and for XLNet over transformers' XLNetLMHeadModel. Each runs in its own
process, which gives each its own peak memory; they take turns, one step each. Both use the same sequences, all of one
length, torch, threads, AdamW (fused), clipping and dropout rates. The biLM's cells and projections are not clipped,
because those of torch's LSTM cannot be.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any

import family_step_peers
import numpy as np
from family_step_peers import ctc_targets
from step import measure, print_profiles, write_report
from step_peers import Case, num_masked

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bag": ("mlm", 30522, {"preset": "bag-300"}),
    "bilm": ("bilm", 30522, {"preset": "bilm-mini", "dropout": 0.1, "cell_clip": None, "projection_clip": None}),
    "awd-lstm": ("clm", 30522, {"preset": "awd-lstm"}),
    "xlnet": ("plm", 32000, {"family": "xlnet", "layers": 4, "hidden": 256, "heads": 4}),
    "ctc": ("ctc", 64, {"preset": "ctc-mini"}),
}
"""Objective, vocabulary and model section."""


def case_of(model: str, arguments: argparse.Namespace) -> Case:
    """Return a peer's input, which is sent to it as JSON."""
    from multihop.pretrain.models.families import parse_model_config

    objective, vocabulary, section = MODELS[model]
    return {
        "model": parse_model_config(section).model_dump(),
        "objective": objective,
        "vocabulary": vocabulary,
        "mask_rate": 1 / 6 if objective == "plm" else 0.15,
        "length": arguments.length,
        "sequences": max(1, arguments.tokens // arguments.length),
        "precision": "fp32",
        "threads": arguments.threads,
        "compile": False,
        "seed": 1,
    }


def flops_of(case: Case) -> float:
    """Return the FLOPs of a step."""
    from multihop.pretrain.models.families import parse_model_config

    lengths = np.full(case["sequences"], case["length"])
    tokens = int(lengths.sum())
    predicted = {
        "mlm": num_masked(case, case["length"]) * len(lengths),
        "plm": num_masked(case, case["length"]) * len(lengths),
        "clm": tokens,
        "bilm": 2 * (tokens - len(lengths)),
        "ctc": ctc_targets(case).size,
    }
    sources = lengths if case["objective"] == "ctc" else None
    return parse_model_config(case["model"]).train_flops(
        case["vocabulary"], lengths, predicted[case["objective"]], sources
    )


def row_of(name: str, case: Case, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return the ratios of a case; ratios of times are medians over the turns."""
    mine, theirs = found["seconds"]["ours"], found["seconds"]["peer"]
    ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
    return {
        "model": name,
        "tokens_per_s": case["sequences"] * case["length"] / statistics.median(mine),
        "share_of_matmul_rate": flops_of(case) / statistics.median(mine) / rate,
        "speed": statistics.median(ratios),
        "speed_from_to": [ratios[0], ratios[-1]],
        "memory": found["peak_bytes"]["ours"] / found["peak_bytes"]["peer"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=4096, help="of a step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print each peer's most expensive operations")
    parser.add_argument("--verbose", action="store_true", help="show the peers' output")
    parser.add_argument("--json", type=Path, default=Path("bench/results/family_step.json"))
    arguments = parser.parse_args()

    import torch

    from multihop.pretrain.engine.device import matmul_rate

    torch.set_num_threads(arguments.threads)
    rate = matmul_rate(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    print(f"torch {torch.__version__}, {arguments.threads} threads, matrix products {rate / 1e9:,.0f} GFLOP/s")
    print(f"{'model':10} {'tokens/s':>8} {'of matmul':>9}  speed and memory beside its peer")
    results = []
    for name in arguments.models:
        case = case_of(name, arguments)
        found = measure(case, ["ours", "peer"], family_step_peers.__file__, arguments)
        row = row_of(name, case, found, rate)
        results.append({**row, **found, "case": case})
        print(
            f"{name:10} {row['tokens_per_s']:8,.0f} {row['share_of_matmul_rate']:9.0%}  {row['speed']:.2f}x "
            f"({row['speed_from_to'][0]:.2f}-{row['speed_from_to'][1]:.2f}) mem {row['memory']:.2f}",
            flush=True,
        )
        print_profiles(found)
    write_report(arguments.json, rate, results)


if __name__ == "__main__":
    main()
