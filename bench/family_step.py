"""Measure speed and peak memory of an optimizer step of the smaller families, of completion and of a tagger.

    python bench/family_step.py --models bag bilm bilm-clipped xlnet ctc --json FILE
    python bench/family_step.py --models awd-lstm --tokens 1024
    python bench/family_step.py --models completion --tokens 1056
    python bench/family_step.py --models tagger --tokens 512

The peer is a plain loop over torch's modules, and for XLNet and completion over transformers' XLNetLMHeadModel and
GPT2LMHeadModel. Each runs in its own process, which gives each its own peak memory; they take turns, one step each.
Both use the same sequences, torch, threads, AdamW (fused), clipping of gradients and dropout rates.

Sequences have one length, but for two models. Completion reads pairs of 4 to 16 tokens and 1 to 8, and predicts the
latter; its peer pads them and gives padding and sources the label -100, and of both the tokens of a pair with the two
end tokens before its sides are counted. The tagger is a BiLSTM and a CRF over frozen vectors of words, in sentences of
4 to 28; its peer pads them, runs torch's LSTM over packed ones, and has pytorch-crf's CRF.

bilm's cells and projections are not clipped, because those of torch's LSTM cannot be; bilm-clipped's are, as published,
and its peer's are in a loop over time.
"""

import argparse
import os
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import family_step_peers
from family_step_peers import LABELS, LSTM_WIDTH, SENTENCES, SOURCES, TARGETS, ctc_targets, lengths_of, pairs_of
from step import measure, print_profiles, write_report
from step_peers import Case, num_masked

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bag": ("mlm", 30522, {"preset": "bag-300"}),
    "bilm": ("bilm", 30522, {"preset": "bilm-mini", "dropout": 0.1, "cell_clip": None, "projection_clip": None}),
    "bilm-clipped": ("bilm", 30522, {"preset": "bilm-mini", "dropout": 0.1}),
    "awd-lstm": ("clm", 30522, {"preset": "awd-lstm"}),
    "xlnet": ("plm", 32000, {"family": "xlnet", "layers": 4, "hidden": 256, "heads": 4}),
    "ctc": ("ctc", 64, {"preset": "ctc-mini"}),
    "completion": ("completion", 50257, {"preset": "gpt2"}),
    "tagger": ("tagging", 30522, {"preset": "bag-300"}),
}
"""Objective, vocabulary and model section; of the tagger that of the frozen vectors."""
_PACKAGES = {
    "xlnet": ("transformers", "transformers"),
    "completion": ("transformers", "transformers"),
    "tagger": ("torchcrf", "pytorch-crf"),
}
"""The module and the package that a model's peer needs."""
_LENGTHS = {"completion": 2 + (sum(SOURCES) + sum(TARGETS)) / 2, "tagging": sum(SENTENCES) / 2}
"""Mean tokens of a pair with its end tokens, and of a sentence."""


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
        "sequences": max(1, int(arguments.tokens / _LENGTHS.get(objective, arguments.length))),
        "precision": "fp32",
        "threads": arguments.threads,
        "compile": False,
        "seed": 1,
    }


def flops_of(case: Case) -> float:
    """Return the FLOPs of a step."""
    from multihop.pretrain.models.families import parse_model_config

    lengths = lengths_of(case)
    tokens = int(lengths.sum())
    if case["objective"] == "tagging":
        return tokens * _tagger_flops(parse_model_config(case["model"]).hidden)
    predicted = {
        "mlm": num_masked(case, case["length"]) * len(lengths),
        "plm": num_masked(case, case["length"]) * len(lengths),
        "clm": tokens,
        "bilm": 2 * (tokens - len(lengths)),
        "ctc": ctc_targets(case).size,
        "completion": sum(len(target) + 1 for _, target in pairs_of(case)),
    }
    sources = lengths if case["objective"] == "ctc" else None
    return parse_model_config(case["model"]).train_flops(
        case["vocabulary"], lengths, predicted[case["objective"]], sources
    )


def _tagger_flops(width: int) -> float:
    """Return the FLOPs of a word: of the matrix products of both LSTM layers and of the linear one, forward and
    backward; frozen vectors of `width` need no gradient, and the CRF has no products."""
    gates, both = 2 * 4 * LSTM_WIDTH, 2 * LSTM_WIDTH
    lstm = gates * (width + LSTM_WIDTH) + gates * (both + LSTM_WIDTH)
    return 2.0 * (3 * (lstm + both * LABELS) - gates * width)


def row_of(name: str, case: Case, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return the ratios of a case; ratios of times are medians over the turns."""
    mine, theirs = found["seconds"]["ours"], found["seconds"]["peer"]
    ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
    return {
        "model": name,
        "tokens_per_s": int(lengths_of(case).sum()) / statistics.median(mine),
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
    for name, (module, package) in _PACKAGES.items():
        if name in arguments.models and find_spec(module) is None:
            raise SystemExit(f"the peer of {name} needs {package}; install it, or measure other --models")

    import torch

    from multihop.pretrain.engine.device import matmul_rate

    torch.set_num_threads(arguments.threads)
    rate = matmul_rate(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    print(f"torch {torch.__version__}, {arguments.threads} threads, matrix products {rate / 1e9:,.0f} GFLOP/s")
    print(f"{'model':12} {'tokens/s':>8} {'of matmul':>9}  speed and memory beside its peer")
    results = []
    for name in arguments.models:
        case = case_of(name, arguments)
        found = measure(case, ["ours", "peer"], family_step_peers.__file__, arguments)
        row = row_of(name, case, found, rate)
        results.append({**row, **found, "case": case})
        print(
            f"{name:12} {row['tokens_per_s']:8,.0f} {row['share_of_matmul_rate']:9.0%}  {row['speed']:.2f}x "
            f"({row['speed_from_to'][0]:.2f}-{row['speed_from_to'][1]:.2f}) mem {row['memory']:.2f}",
            flush=True,
        )
        print_profiles(found)
    write_report(arguments.json, rate, results)


if __name__ == "__main__":
    main()
