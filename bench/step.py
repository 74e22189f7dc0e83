"""Tokens a second and peak memory of one optimizer step: ours, Hugging Face's model, and a plain loop for GPT-2.

    python bench/step.py --shapes bert-mini:128 bert-base:512:0.3 gpt2-small:512 --json FILE

A shape is MODEL:LENGTH[:PADDING], PADDING being the share of a rectangular batch that is padding. Every peer is a
process of its own, so that each has its own peak of memory; they take turns, a step each. All see the same sequences,
with the same torch and threads, AdamW (fused), clipping, and dropout as published. Hugging Face's loop is that of its
Trainer between two batches. Tokens are real pieces, padding not counted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "xl": (48, 1600, 25),
}
VOCABULARY = {"bert": 30522, "gpt2": 50257}
MASK_RATE = 0.15
ALL_SHAPES = [
    f"{family}-{size}:{length}{padding}"
    for family in ("bert", "gpt2")
    for size in ("mini", "small", "base")
    for length in (128, 512)
    for padding in ("", ":0.3")
]
Case = dict[str, Any]
Stepper = Callable[[], None]


def case_of(shape: str, arguments: argparse.Namespace) -> Case:
    """What a peer has to know, as JSON."""
    model, length, *padding = shape.split(":")
    family, size = model.split("-")
    layers, hidden, heads = SIZES[size]
    return {
        "shape": shape,
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "length": int(length),
        "padding": float(padding[0]) if padding else 0.0,
        "sequences": max(1, arguments.tokens // int(length)),
        "dropout": arguments.dropout,
        "precision": arguments.precision,
        "threads": arguments.threads,
        "compile": arguments.compile,
        "seed": 1,
    }


def lengths_of(case: Case) -> np.ndarray:
    """int64 (S,): evenly spread from a full sequence down to what leaves so much padding, in a random order."""
    shares = np.linspace(1.0, 1 - 2 * case["padding"], case["sequences"])
    return np.random.default_rng(case["seed"]).permutation(np.round(shares * case["length"]).astype(np.int64))


def texts_of(case: Case) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Lengths, and of each sequence its pieces and which of them are masked."""
    rng, lengths = np.random.default_rng(case["seed"]), lengths_of(case)
    pieces = [rng.integers(5, VOCABULARY[case["family"]], length) for length in lengths]
    masked = [np.sort(rng.choice(length, max(1, round(MASK_RATE * length)), replace=False)) for length in lengths]
    return lengths, pieces, masked


def ours(case: Case) -> Stepper:
    """A step of our engine on one rank."""
    import torch

    from pretrain.config import TrainingConfig
    from pretrain.engine import Engine
    from pretrain.host_memory import keep_freed_memory
    from pretrain.models import build_model, initialise
    from pretrain.objectives.batch import Batch, layout
    from pretrain.ranks import join

    keep_freed_memory()  # as a training worker does
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": case["port"]}
    os.environ.update(where)
    ranks = join()
    engine_settings = {
        "deepspeed": {},
        "zero_stage": 0 if case["precision"] == "fp32" else 1,
        "precision": case["precision"],
        "compile": case["compile"],
    }
    sizes = {name: case[name] for name in ("family", "layers", "hidden", "heads", "dropout")}
    config = TrainingConfig.model_validate(
        {
            "model": {**sizes, "max_positions": max(512, case["length"])},
            "phases": [{"steps": 2, "seq_len": case["length"], "batch_size": case["sequences"]}],
            "engine": engine_settings,
        }
    )
    yield_baseline()
    model = build_model(config.model, VOCABULARY[case["family"]])
    initialise(model, 1)
    engine = Engine(config, model.to(ranks.device), ranks, case["sequences"])
    lengths, pieces, masked = texts_of(case)
    inputs = {"input_ids": np.concatenate(pieces), **layout(lengths)}
    starts = np.cumsum(lengths) - lengths
    if case["family"] == "bert":
        at = np.concatenate([start + each for start, each in zip(starts, masked, strict=True)])
        inputs |= {"segments": np.zeros(int(lengths.sum()), np.int64), "masked_at": at}
        inputs |= {"masked_ids": inputs["input_ids"][at], "is_random_next": np.zeros(len(lengths), np.int64)}
        counts = {"token": len(at), "nsp": len(lengths)}
    else:
        inputs["next_ids"] = np.roll(inputs["input_ids"], -1)
        counts = {"token": int(lengths.sum())}
    batch = Batch(inputs, np.empty(0, np.int64), counts, int(lengths.sum()))
    floats = {name: float(count) for name, count in counts.items()}

    def step() -> None:
        sums = engine.forward_backward(batch, floats)
        engine.step(lr=1e-4)
        float(sums["token"])
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def hugging_face(case: Case) -> Stepper:
    """What `transformers.Trainer` does between two batches."""
    import transformers

    yield_baseline()
    size = {"vocab_size": VOCABULARY[case["family"]]}
    rate = case["dropout"]
    if case["family"] == "bert":
        config = transformers.BertConfig(
            **size,
            hidden_size=case["hidden"],
            num_hidden_layers=case["layers"],
            num_attention_heads=case["heads"],
            intermediate_size=4 * case["hidden"],
            max_position_embeddings=max(512, case["length"]),
            hidden_dropout_prob=rate,
            attention_probs_dropout_prob=rate,
        )
        model = transformers.BertForPreTraining(config)
    else:
        config = transformers.GPT2Config(
            **size,
            n_embd=case["hidden"],
            n_layer=case["layers"],
            n_head=case["heads"],
            n_positions=max(512, case["length"]),
            resid_pdrop=rate,
            embd_pdrop=rate,
            attn_pdrop=rate,
        )
        model = transformers.GPT2LMHeadModel(config)
    inputs = padded(case)
    if case["family"] == "bert":
        inputs["next_sentence_label"] = np.zeros(case["sequences"], np.int64)
    else:
        inputs["labels"] = np.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
        inputs.pop("token_type_ids")
    return plain_loop(case, model, inputs, lambda out: out.loss)


def plain(case: Case) -> Stepper:
    """GPT-2 in a plain loop."""
    import plain_gpt2

    yield_baseline()
    model = plain_gpt2.PlainGPT2(
        VOCABULARY["gpt2"], case["layers"], case["hidden"], case["heads"], max(512, case["length"]), case["dropout"]
    )
    inputs = padded(case)
    targets = np.where(inputs["attention_mask"] == 1, np.roll(inputs["input_ids"], -1, 1), -1)
    return plain_loop(case, model, {"ids": inputs["input_ids"], "targets": targets}, lambda loss: loss)


def padded(case: Case) -> dict[str, np.ndarray]:
    """The same sequences as a rectangle."""
    lengths, pieces, masked = texts_of(case)
    shape = (case["sequences"], case["length"])
    ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, -100, np.int64), np.zeros(shape, np.int64)
    for row, (length, text, chosen) in enumerate(zip(lengths, pieces, masked, strict=True)):
        ids[row, :length], mask[row, :length] = text, 1
        labels[row, chosen] = text[chosen]
    return {"input_ids": ids, "token_type_ids": np.zeros(shape, np.int64), "attention_mask": mask, "labels": labels}


def plain_loop(case: Case, model: Any, arrays: dict[str, np.ndarray], loss_of: Callable[[Any], Any]) -> Stepper:
    """Forward, backward, clip, update; under bf16 by autocast."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    if case["compile"]:
        model.compile()
    inputs = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    groups = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-4, fused=True
    )

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=case["precision"] == "bf16"):
            loss = loss_of(model(**inputs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        float(loss.detach())
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


PEERS = {"ours": ours, "hugging_face": hugging_face, "plain": plain}


def yield_baseline() -> None:
    """From here on the memory is the model's and its training's: what libraries take is not compared."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    global _baseline
    _baseline = _status("VmRSS")


_baseline = 0


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def peer_process(name: str) -> None:
    """Builds its case from standard input, and makes a step for each line that comes after; the times go out."""
    case = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    step = PEERS[name](case)
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        told: dict[str, Any]
        if line.strip() == "profile":
            told = {"profile": profile(step)}
        elif line.strip() == "end":
            on_gpu = torch.cuda.is_available()
            told = {"peak": torch.cuda.max_memory_allocated() if on_gpu else _status("VmHWM") - _baseline}
        else:
            before = time.perf_counter()
            step()
            told = {"seconds": time.perf_counter() - before}
        print(json.dumps({"peer": name, **told}), file=out, flush=True)


def profile(step: Stepper) -> list[list[Any]]:
    """The costliest operations of three steps: name, share of the time."""
    from torch.profiler import profile as torch_profile

    with torch_profile() as found:
        for _ in range(3):
            step()
    averages = found.key_averages()
    own = [(e.key, e.self_device_time_total or e.self_cpu_time_total) for e in averages]
    total = sum(time for _, time in own)
    return [[name, time / total] for name, time in sorted(own, key=lambda each: -each[1])[:12]]


def flops_of(case: Case) -> tuple[float, float]:
    """Operations of a step: those that are needed, and those of a rectangle with all its logits."""
    from pretrain.config import ModelConfig
    from pretrain.flops import model_flops

    sizes = {name: case[name] for name in ("family", "layers", "hidden", "heads")}
    model = ModelConfig.model_validate({**sizes, "max_positions": max(512, case["length"])})
    lengths, full = lengths_of(case), np.full(case["sequences"], case["length"])
    causal = case["family"] == "gpt2"
    asked = int(lengths.sum()) if causal else sum(max(1, round(MASK_RATE * length)) for length in lengths)
    vocabulary = VOCABULARY[case["family"]]
    return model_flops(model, vocabulary, lengths, asked), model_flops(model, vocabulary, full, int(full.sum()))


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every peer's step times and peak of memory."""
    names = [name for name in arguments.peers if name != "plain" or case["family"] == "gpt2"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(case["threads"])}
    processes = {}
    for name in names:
        processes[name] = subprocess.Popen(
            [sys.executable, __file__, "--peer", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments.verbose else subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        say(processes[name], json.dumps({**case, "port": str(29500 + os.getpid() % 1000)}))
    for _ in range(arguments.warm_up):
        for name in names:
            ask(processes[name], name, "step")
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.repeats):
        for name in names:
            times[name].append(ask(processes[name], name, "step")["seconds"])
    profiles = {name: ask(processes[name], name, "profile")["profile"] for name in names} if arguments.profile else {}
    peaks = {name: ask(processes[name], name, "end")["peak"] for name in names}
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return {"seconds": times, "peak_bytes": peaks, "profile": profiles}


def say(process: Any, line: str) -> None:
    process.stdin.write(line + "\n")
    process.stdin.flush()


def ask(process: Any, name: str, what: str) -> dict[str, Any]:
    say(process, what)
    for line in process.stdout:
        if line.startswith('{"peer"'):
            return json.loads(line)
    raise SystemExit(f"{name} ended; see why by --verbose")


def row_of(case: Case, found: dict[str, Any], rate: float) -> dict[str, Any]:
    """The ratios of a case; those of times are medians of ratios within a turn."""
    needed, rectangle = flops_of(case)
    mine = found["seconds"]["ours"]
    tokens = int(lengths_of(case).sum())
    row: dict[str, Any] = {
        "shape": case["shape"],
        "tokens_per_s": tokens / statistics.median(mine),
        "ratio_by_flops": rectangle / needed,
        "share_of_matmul_rate": needed / statistics.median(mine) / rate,
    }
    for name, theirs in found["seconds"].items():
        if name != "ours":
            ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
            row[name] = {
                "speed": statistics.median(ratios),
                "speed_from_to": [ratios[0], ratios[-1]],
                "memory": found["peak_bytes"]["ours"] / found["peak_bytes"][name],
            }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=ALL_SHAPES)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tokens", type=int, default=4096, help="places in a step's rectangle (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action="store_true", help="ours by layer, theirs as a whole")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="print each peer's costliest operations")
    parser.add_argument("--verbose", action="store_true", help="show what the peers print")
    parser.add_argument("--json", type=Path, default=Path("bench/results/step.json"))
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        return peer_process(arguments.peer)

    import torch

    from pretrain.flops import matmul_rate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads)
    rate = matmul_rate(device, torch.bfloat16 if arguments.precision == "bf16" else torch.float32)
    print(f"torch {torch.__version__}, {arguments.threads} threads, matrix products {rate / 1e9:,.0f} GFLOP/s")
    print(f"{'shape':22} {'tokens/s':>9} {'of matmul':>9} {'by FLOPs':>8}  speed and memory beside each peer")
    results = []
    for shape in arguments.shapes:
        case = case_of(shape, arguments)
        found = measure(case, arguments)
        row = row_of(case, found, rate)
        results.append({**row, **found, "case": case})
        beside = "  ".join(
            "{} {:.2f}x ({:.2f}-{:.2f}) mem {:.2f}".format(
                name, row[name]["speed"], *row[name]["speed_from_to"], row[name]["memory"]
            )
            for name in found["seconds"]
            if name != "ours"
        )
        print(
            f"{shape:22} {row['tokens_per_s']:9,.0f} {row['share_of_matmul_rate']:9.0%} {row['ratio_by_flops']:8.2f}  "
            f"{beside}",
            flush=True,
        )
        for name, costs in found["profile"].items():
            print(f"    {name}: " + ", ".join(f"{operation} {share:.0%}" for operation, share in costs))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    machine = {"platform": platform.platform(), "torch": torch.__version__, "matmul_flops_per_s": rate}
    told = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **machine, "results": results}
    arguments.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
