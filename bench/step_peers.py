"""The peers of bench/step.py, each a process: `step_peers.py NAME` reads a case, then takes a step per line."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Case = dict[str, Any]
Stepper = Callable[[], None]


def lengths_of(case: Case) -> np.ndarray:
    """Return int64 (S,), lengths that leave the case's share of padding, spread evenly and in random order."""
    shares = np.linspace(1.0, 1 - 2 * case["padding"], case["sequences"])
    return np.random.default_rng(case["seed"]).permutation(np.round(shares * case["length"]).astype(np.int64))


def num_masked(case: Case, length: int) -> int:
    """Return the number of tokens to predict of a sequence."""
    return max(1, round(case["mask_rate"] * length))


def texts_of(case: Case) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Return the lengths and, for each sequence, its tokens and the positions of the masked ones."""
    rng, lengths = np.random.default_rng(case["seed"]), lengths_of(case)
    tokens = [rng.integers(5, case["vocabulary"], length) for length in lengths]
    masked = [np.sort(rng.choice(length, num_masked(case, length), replace=False)) for length in lengths]
    return lengths, tokens, masked


def ours(case: Case) -> Stepper:
    """Return a function that runs a step of our engine on one rank."""
    return engine_loop(case, batch_of)


def batch_of(case: Case) -> Any:
    from multihop.pretrain.objectives.batch import Batch
    from multihop.pretrain.packed_tokens import cumulative_lengths, pack

    lengths, tokens, masked = texts_of(case)
    input_ids, cu_seqlens = np.concatenate(tokens), cumulative_lengths(lengths)
    inputs: dict[str, Any]
    if case["causal"]:
        inputs = {"packed": pack(input_ids, cu_seqlens), "labels": np.roll(input_ids, -1)}
        counts = {"clm": int(lengths.sum())}
    else:
        has_pairs = case["model"]["family"] == "bert"
        at = np.concatenate([start + each for start, each in zip(cu_seqlens[:-1], masked, strict=True)])
        segments = np.zeros(len(input_ids), np.int64) if has_pairs else None
        inputs = {"packed": pack(input_ids, cu_seqlens, segments), "masked_positions": at, "labels": input_ids[at]}
        counts = {"mlm": len(at)}
        if has_pairs:
            inputs["is_random_next"] = np.zeros(len(lengths), np.int64)
            counts["nsp"] = len(lengths)
    return Batch(inputs, np.empty(0, np.int64), counts, int(lengths.sum()))


def engine_loop(case: Case, batch_of: Callable[[Case], Any]) -> Stepper:
    """Return a function that runs a step of our engine over the batch of a case, as a training worker does."""
    import torch

    from multihop.common.machine import disable_malloc_trim
    from multihop.pretrain.config import TrainingConfig
    from multihop.pretrain.engine.deepspeed_internals import import_deepspeed
    from multihop.pretrain.engine.engine import Engine
    from multihop.pretrain.engine.ranks import join_process_group
    from multihop.pretrain.models.build import build_model, init_weights

    disable_malloc_trim()  # as a training worker does
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": case["port"]}
    os.environ.update(where)
    ranks = join_process_group()
    engine_settings = {
        "deepspeed": {},
        "zero_stage": 0 if case["precision"] == "fp32" else 1,
        "precision": case["precision"],
        "compile": case["compile"],
    }
    config = TrainingConfig.model_validate(
        {
            "model": case["model"],
            "phases": [{"steps": 2, "seq_len": case["length"], "global_batch_size": case["sequences"]}],
            "engine": engine_settings,
        }
    )
    import_deepspeed()
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  # with sympy, as `to_empty` of a model on the meta device

    reset_peak_memory()
    model = build_model(config.model, case["vocabulary"])
    init_weights(model, 1)
    engine = Engine(config, model.to(ranks.device), ranks, case["sequences"])
    batch = batch_of(case)
    floats = {name: float(count) for name, count in batch.counts.items()}

    def step() -> None:
        sums = engine.forward_backward(batch, floats)
        engine.step(lr=1e-4)
        float(next(iter(sums.values())))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return step


def hugging_face(case: Case) -> Stepper:
    """Return a function that does the work of `transformers.Trainer` between two batches."""
    model = transformers_model(case, {"pad": 0, "cls": 2, "sep": 3, "end": 0})
    inputs = padded(case)
    if case["model"]["family"] == "bert":
        inputs["next_sentence_label"] = np.zeros(case["sequences"], np.int64)
    else:
        inputs.pop("token_type_ids")
    if case["causal"]:
        inputs["labels"] = np.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
    return plain_loop(case, model, inputs, lambda out: out.loss)


def transformers_model(case: Case, special_ids: dict[str, int]) -> Any:
    """Return transformers' model of a case, with new weights. Memory is counted from before it."""
    import transformers

    from multihop.pretrain.checkpoint.huggingface_config import config_json
    from multihop.pretrain.models.families import parse_model_config

    described = config_json(parse_model_config(case["model"]), case["vocabulary"], special_ids)
    config = transformers.AutoConfig.for_model(**described)
    model_class = getattr(transformers, described["architectures"][0])  # imports its module
    import_optimizers()
    reset_peak_memory()
    return model_class(config)


def plain(case: Case) -> Stepper:
    """Return a function that runs a step of GPT-2 in a plain loop."""
    import plain_gpt2

    import_optimizers()
    reset_peak_memory()
    sizes = (case["model"][name] for name in ("layers", "hidden", "heads", "max_positions", "dropout"))
    model = plain_gpt2.PlainGPT2(case["vocabulary"], *sizes)
    inputs = padded(case)
    targets = np.where(inputs["attention_mask"] == 1, np.roll(inputs["input_ids"], -1, 1), -1)
    return plain_loop(case, model, {"ids": inputs["input_ids"], "targets": targets}, lambda loss: loss)


def padded(case: Case) -> dict[str, np.ndarray]:
    """Return the sequences of `texts_of`, padded."""
    lengths, pieces, masked = texts_of(case)
    shape = (case["sequences"], case["length"])
    ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, -100, np.int64), np.zeros(shape, np.int64)
    for row, (length, text, chosen) in enumerate(zip(lengths, pieces, masked, strict=True)):
        ids[row, :length], mask[row, :length] = text, 1
        labels[row, chosen] = text[chosen]
    return {"input_ids": ids, "token_type_ids": np.zeros(shape, np.int64), "attention_mask": mask, "labels": labels}


def plain_loop(case: Case, model: Any, arrays: dict[str, np.ndarray], loss_of: Callable[[Any], Any]) -> Stepper:
    """Return a function that runs forward, backward, clipping and update; bf16 is by autocast."""
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


def import_optimizers() -> None:
    """Import what torch.optim imports when the first optimizer is created: torch's compiler, 80 MB."""
    import torch._dynamo  # noqa: F401


def reset_peak_memory() -> None:
    """Start counting memory here, so that it is that of the model and its training, without imported libraries.

    All of them must have been imported, those too that others import when they are first used.
    """
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    global _baseline
    _baseline = _status("VmRSS")


_baseline = 0


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def peer_process(name: str, peers: dict[str, Callable[[Case], Stepper]]) -> None:
    """Read a case from standard input, then run a step per line and print its time."""
    case = json.loads(sys.stdin.readline())
    import torch

    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    step = peers[name](case)
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        answer: dict[str, Any]
        if line.strip() == "profile":
            answer = {"profile": profile(step)}
        elif line.strip() == "end":
            on_gpu = torch.cuda.is_available()
            answer = {"peak": torch.cuda.max_memory_allocated() if on_gpu else _status("VmHWM") - _baseline}
        else:
            before, used = time.perf_counter(), time.process_time()
            step()
            answer = {"seconds": time.perf_counter() - before, "cpu_seconds": time.process_time() - used}
        print(json.dumps({"peer": name, **answer}), file=out, flush=True)


def profile(step: Stepper) -> list[list[Any]]:
    """Return the most expensive operations of three steps and their shares of the time, on a GPU if there is one."""
    from torch.profiler import profile as torch_profile

    with torch_profile() as found:
        for _ in range(3):
            step()
    averages = found.key_averages()
    on_device = any(e.self_device_time_total for e in averages)
    own = [(e.key, e.self_device_time_total if on_device else e.self_cpu_time_total) for e in averages]
    total = sum(time for _, time in own)
    return [[name, time / total] for name, time in sorted(own, key=lambda each: -each[1])[:12]]


if __name__ == "__main__":
    peer_process(sys.argv[1], PEERS)
