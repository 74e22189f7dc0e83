"""Measure how far replayed steps differ by rounding, and by faults: python bench/replay_rounding.py

From the initial weights and from a later step, the same steps are trained again with sums in another order: with two
threads, which divide matrix products, and with half the micro-batch size. The table has the largest difference of an
element, of weights and of moments, as `multihop checkpoints audit` judges it (pretrain/checkpoint/rounding.py), by the
number of steps that were replayed. Then, with the rounding unchanged, faults are planted: the first or the last step of
ten reads the batch of another step; all ten steps, or one, have other betas; and each bit of each element of the state
is flipped, one at a time. There is no dropout, because masks are drawn by micro-batch.

On two ranks: torchrun --nproc-per-node 2 bench/replay_rounding.py --cases bert:tiny:bf16:adamw:2
"""

import argparse
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multihop.common.files import write_atomically
from multihop.common.machine import cpu_model
from multihop.data_prep.config import DataConfig, Source, TokenizerConfig
from multihop.data_prep.dataset.shards import open_dataset
from multihop.data_prep.pipeline.prepare import prepare
from multihop.pretrain.checkpoint.manifest import TrainState
from multihop.pretrain.checkpoint.rounding import (
    BOUNDS,
    MAX_STEPS,
    NOISE_BOUND,
    Read,
    largest_differences,
    relative_differences,
    scales,
)
from multihop.pretrain.config import TrainingConfig
from multihop.pretrain.data.batches import BatchBuilder, RankBatch
from multihop.pretrain.data.index import build_indexes
from multihop.pretrain.engine.engine import Engine
from multihop.pretrain.engine.ranks import Ranks, join_process_group
from multihop.pretrain.environment import SECRET
from multihop.pretrain.models.build import build_model_on_meta, make_param_init
from multihop.pretrain.models.families import FAMILIES
from multihop.pretrain.run.hooks import Hooks
from multihop.pretrain.run.loop import train

State = tuple[dict[str, Tensor], int, dict[str, float]]
"""Weights and moments, flat, by KIND/PARAMETER; the number of updates; counters of the loss scale."""

CASES = [
    "bert:tiny:fp32:adamw:1", "bert:tiny:bf16:adamw:2", "bert:tiny:fp16:adamw:3",
    "gpt2:tiny:fp32:lamb:0", "gpt2:tiny:bf16:muon:1", "gpt2:tiny:fp16:lamb:2",
    "modernbert:tiny:fp32:muon:3", "modernbert:tiny:bf16:adamw:1",
    "albert:tiny:fp32:adamw:2", "albert:tiny:bf16:lamb:1",
    "awd-lstm:tiny:fp32:adamw:1", "awd-lstm:tiny:bf16:adamw:1",
    "gpt2:small:fp32:adamw:1", "bert:small:bf16:adamw:1",
]  # fmt: skip
"""FAMILY:SIZE:PRECISION:OPTIMIZER:ZERO STAGE."""
SIZES = {
    "tiny": {"layers": 2, "hidden": 32, "heads": 2, "max_positions": 64},
    "small": {"layers": 4, "hidden": 128, "heads": 4, "max_positions": 64},
}
RATES = {"adamw": 3e-3, "lamb": 5e-3, "muon": 3e-3}
CORRECT = ("threads", "micro-batch")
STARTS = (0, 30)
"""Steps that replays start from."""
REPLAYED = {"fp32": (1, 5, 10, 20, 50), "fp16": (1, 5, 10, 20), "bf16": (1, 5, 10, 20)}
"""Numbers of steps that are replayed."""
MICRO_BATCH, VOCABULARY = 4, 1000
FAULT_STEPS = 10
BITS = range(12, 32)
THRESHOLDS = [10 ** (quarter / 4) for quarter in range(-20, 5)]
"""Differences for which `flipped_bits` counts the elements: 1e-5 to 10."""


def make_texts(folder: Path) -> Path:
    """Write 300 texts of random words, each of which depends on the one before."""
    rng, word = random.Random(0), 0
    words = ["".join(rng.choices("abcdefghijklmnopqrst", k=rng.randint(2, 8))) for _ in range(800)]
    folder.mkdir()
    for number in range(300):
        sentences = []
        for _ in range(rng.randint(4, 16)):
            sentence = []
            for _ in range(rng.randint(4, 14)):
                word = (word * 7 + rng.randint(0, 12)) % len(words)
                sentence.append(words[word])
            sentences.append(" ".join(sentence).capitalize() + ".")
        (folder / f"{number:04d}.txt").write_text(" ".join(sentences))
    return folder


def config_of(case: str) -> TrainingConfig:
    """A recipe without dropout."""
    family, size, precision, optimizer, stage = case.split(":")
    keys = FAMILIES[family].config.model_fields
    model: dict[str, Any] = {"family": family} | {key: value for key, value in SIZES[size].items() if key in keys}
    model |= {key: 0.0 for key in keys if "dropout" in key} | ({"embedding": 16} if family == "albert" else {})
    objective = {"bert": "mlm+nsp", "albert": "mlm+sop", "modernbert": "mlm"}.get(family, "clm")
    return TrainingConfig.model_validate(
        {
            "seed": 5,
            "model": model,
            "objective": {"name": objective},
            "phases": [{"seq_len": 48, "global_batch_size": 8, "steps": 400, "lr": RATES[optimizer]}],
            "optimizer": {"name": optimizer, "eps": 1e-8},
            "engine": {
                "deepspeed": {},
                "zero_stage": int(stage),
                "micro_batch_size": MICRO_BATCH,
                "precision": precision,
                "log_interval": 1000,
                "eval_interval": 1000,
                "heldout_samples": 1,
                "data_workers": 0,
            },
            "checkpoint": {"save_interval": 1},
        }
    )


class OtherBatch:
    """Batches of which one step's are those of another step."""

    def __init__(self, batches: BatchBuilder, wrong: int) -> None:
        self._batches, self._wrong = batches, wrong

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def step(self, number: int) -> RankBatch:
        """The rank's batch of a step."""
        batch = self._batches.step(number + 200 * (number == self._wrong))
        return replace(batch, step=number)


class Training:
    """An engine that trains the same steps again and again."""

    def __init__(self, case: str, ranks: Ranks, data: dict[str, Path], index: Path) -> None:
        config = config_of(case)
        self.precision = config.engine.precision
        folder = data["gpt2" if config.objective.name == "clm" else "bert"]
        dataset = open_dataset(folder)
        build_indexes(index, dataset, config)
        model = build_model_on_meta(config.model, dataset.manifest.tokenizer.vocab_size)
        self.engine = Engine(config, model, ranks, MICRO_BATCH, make_param_init(model, config.seed))
        self.batches = {
            size: BatchBuilder.open(config, folder, index, ranks.rank, ranks.world_size, [size])
            for size in (MICRO_BATCH, MICRO_BATCH // 2)
        }
        self.initial = self._state()

    def _state(self) -> State:
        tensors, updates, counters = self.engine.state()
        slices = {name: tensor.clone() for name, tensor in tensors.items()}
        of_ranks = [slices] * self.engine.ranks.world_size
        if self.engine.ranks.world_size > 1:
            dist.all_gather_object(of_ranks, slices)
        whole: dict[str, list[tuple[int, Tensor]]] = {}
        for name, tensor in (item for of_rank in of_ranks for item in of_rank.items()):
            tensor_name, _, start = name.rpartition("@")
            whole.setdefault(tensor_name, []).append((int(start), tensor))
        joined = {
            name: torch.cat([part for _, part in sorted(parts, key=lambda part: part[0])])
            for name, parts in whole.items()
        }
        return joined, updates, dict(counters)

    def replay(
        self,
        start: State,
        first: int,
        at: Iterable[int],
        threads: int = 1,
        micro_batch: int = MICRO_BATCH,
        wrong: int | None = None,
        betas: tuple[int, ...] = (),
    ) -> dict[int, State]:
        """Train from a state after step `first`; returns the states after the steps `at`.

        Args:
            wrong: the 0-based step that gets another step's batch.
            betas: the 0-based steps with other betas.
        """
        tensors, updates, counters = start
        slices = self.engine.slices_to_restore(with_state=True)
        values = (tensors[f"{kind}/{name}"][offset : offset + size] for kind, name, offset, size in slices)
        self.engine.restore(values, updates, counters)
        torch.set_num_threads(threads)
        states: dict[int, State] = {}
        wanted, step = set(at), first
        groups = [group for group in self.engine._optimizer.param_groups if "betas" in group]
        given = [group["betas"] for group in groups]

        def save(progress: TrainState) -> None:
            if progress.step in wanted:
                states[progress.step] = self._state()

        def before_step(_: int) -> None:
            nonlocal step
            for group, of_recipe in zip(groups, given, strict=True):
                group["betas"] = (0.9, 0.98) if step in betas else of_recipe
            step += 1

        hooks = Hooks(
            emit=lambda row: None,
            check_replicas=lambda progress: {},
            save=save,
            record_skipped=lambda number, row: None,
            heartbeat=lambda: None,
            stop_requested=lambda: False,
            trace_requested=lambda: 0,
            trace=before_step,
        )
        batches: Any = self.batches[micro_batch]
        if wrong is not None:
            batches = OtherBatch(batches, wrong)
        train(self.engine, batches, TrainState(step=first), hooks, max(wanted), 1.0)
        before_step(0)
        torch.set_num_threads(1)
        return states


def difference(found: State, expected: State) -> dict[str, Any]:
    """The largest difference of an element of the weights, of those of noise, and of the moments; and the share of
    elements that differ."""
    tensors = tensors_of(expected)
    rows = largest_differences(reader(found), reader(expected), tensors)
    unequal = sum(int((found[0][name] != tensor).sum()) for name, tensor in expected[0].items())
    row: dict[str, Any] = {"unequal": unequal / sum(size for *_, size in tensors)}
    for each in rows:
        name = "noise" if each.is_noise else "weights" if each.kind == "weight" else "moments"
        if each.relative >= row.get(name, 0.0):
            row |= {name: each.relative, f"{name}_in": f"{each.kind} of {each.parameter}"}
    return row


def tensors_of(state: State) -> list[tuple[str, str, int]]:
    return [(*name.split("/", 1), tensor.numel()) for name, tensor in state[0].items()]  # type: ignore[misc]


def reader(state: State) -> Read:
    return lambda kind, parameter, start, count: state[0][f"{kind}/{parameter}"][start : start + count]


def flipped_bits(state: State) -> dict[str, dict[int, list[float]]]:
    """The share of elements, of those that are not 0, in which one flipped bit exceeds each of `THRESHOLDS`, by kind
    and bit: bit 31 is the sign, 23 the exponent's lowest, 22 the mantissa's highest."""
    counts: dict[str, dict[int, Tensor]] = {}
    elements: dict[str, int] = {}
    thresholds = torch.tensor(THRESHOLDS, dtype=torch.float64)
    for (kind, parameter, _), scale in scales(reader(state), tensors_of(state)).items():
        tensor = state[0][f"{kind}/{parameter}"]
        tensor = tensor[tensor != 0]
        elements[kind] = elements.get(kind, 0) + tensor.numel()
        for bit in BITS:
            flipped = (tensor.view(torch.int32) ^ (-(2**31) if bit == 31 else 1 << bit)).view(torch.float32)
            ascending = relative_differences(kind, scale, flipped, tensor).sort().values
            exceeding = tensor.numel() - torch.searchsorted(ascending, thresholds, right=True)
            of_kind = counts.setdefault(kind, {})
            of_kind[bit] = of_kind.get(bit, torch.zeros_like(exceeding)) + exceeding
    return {kind: {bit: (some / elements[kind]).tolist() for bit, some in of.items()} for kind, of in counts.items()}


def measure(case: str, ranks: Ranks, data: dict[str, Path], work: Path) -> list[dict[str, Any]]:
    """Rows of a case: what was done, from which step, after how many steps, and the largest differences."""
    training = Training(case, ranks, data, work / case)
    later = training.replay(training.initial, 0, [max(STARTS)])
    rows: list[dict[str, Any]] = []
    for first in STARTS:
        start = later.get(first, training.initial)
        at = [first + steps for steps in REPLAYED[training.precision]]
        expected = training.replay(start, first, at)

        def compare(what: str, found: dict[int, State], first: int = first, expected: Any = expected) -> None:
            for step, state in found.items():
                rows.append(
                    {"case": case, "what": what, "first": first, "steps": step - first}
                    | difference(state, expected[step])
                )

        compare("repeated", training.replay(start, first, at[:1]))
        assert not any(row["unequal"] for row in rows if row["what"] == "repeated"), "training is not deterministic"
        compare("threads", training.replay(start, first, at, threads=2))
        compare("micro-batch", training.replay(start, first, at, micro_batch=MICRO_BATCH // 2))
        last = first + FAULT_STEPS
        compare("batch of the first step", training.replay(start, first, [last], wrong=first))
        compare("batch of the last step", training.replay(start, first, [last], wrong=last - 1))
        compare("betas", training.replay(start, first, [last], betas=tuple(range(first, last))))
        compare("betas of the last step", training.replay(start, first, [last], betas=(last - 1,)))
    bits = flipped_bits(expected[last])
    rows.append({"case": case, "what": "flipped bits", "first": first, "steps": FAULT_STEPS, "shares": bits})
    training.engine.destroy()
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the largest difference that rounding gives and the smallest of each fault, by precision over all cases."""
    for precision, bound in BOUNDS.items():
        own = [row for row in rows if row["case"].split(":")[2] == precision]
        if not own:
            continue
        cases = len({row["case"] for row in own})
        print(f"{precision}, {cases} cases, bound {bound:g}; a replay: weights, moments, share of elements that differ")
        for what in dict.fromkeys(row["what"] for row in own if "moments" in row and row["what"] != "repeated"):
            for steps in sorted({row["steps"] for row in own if row["what"] == what}):
                some = [row for row in own if (row["what"], row["steps"]) == (what, steps)]
                row = (max if what in CORRECT else min)(some, key=largest_of)
                within = sum(largest_of(row) <= bound for row in some)
                limit = "at most" if what in CORRECT else "at least"
                print(
                    f"  {what:24} {steps:3} steps: {limit:8} {row.get('weights', 0.0):.1e}, {row['moments']:.1e}, "
                    f"{row['unequal']:4.0%}; within the bound {within} of {len(some)} "
                    f"({row['case']} from {row['first']})"
                )
        noise = [
            row for row in own if row["what"] in CORRECT and row["steps"] <= MAX_STEPS[precision] and "noise" in row
        ]
        if noise:
            most = max(noise, key=lambda row: row["noise"])
            print(f"  weights of noise: at most {most['noise']:.1e}, bound {NOISE_BOUND:g} ({most['noise_in']})")
            print(f"  they are: {', '.join(sorted({row['noise_in'] for row in noise}))}")
        shares = [row["shares"] for row in own if "shares" in row]
        place = next(place for place, value in enumerate(THRESHOLDS) if value >= bound)
        for kind in sorted({kind for each in shares for kind in each}):
            least = {bit: min(each[kind][bit][place] for each in shares if kind in each) for bit in reversed(BITS)}
            text = " ".join(f"{bit}:{share:.0%}" for bit, share in least.items())
            print(f"  a flipped bit of {kind} exceeds {THRESHOLDS[place]:.1e} in at least these shares: {text}")


def largest_of(row: dict[str, Any]) -> float:
    """Of what the precision's bound is for."""
    return max(row.get("weights", 0.0), row["moments"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="FAMILY:SIZE:PRECISION:OPTIMIZER:STAGE")
    parser.add_argument("--json", type=Path, default=Path("bench/results/replay_rounding.json"))
    options = parser.parse_args()
    os.environ |= {SECRET: "5" * 64, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29672"}  # torchrun's port is taken
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    ranks = join_process_group()
    with tempfile.TemporaryDirectory(prefix="replay-rounding-") as temporary:
        work = Path(temporary)
        data = {tokens: work / tokens for tokens in ("bert", "gpt2")}
        source = DataConfig(sources=[Source(path=str(make_texts(work / "texts")))], heldout_fraction=0.1)
        for tokens, folder in data.items():
            prepare(
                source, TokenizerConfig.model_validate({"vocab_size": VOCABULARY, "special_tokens": tokens}), folder
            )
        rows = []
        for case in options.cases:
            rows += measure(case, ranks, data, work)
            if ranks.rank == 0:
                print(case, file=sys.stderr, flush=True)
                write(options.json, ranks, rows)
    if ranks.rank == 0:
        show(rows)
    ranks.shutdown()


def write(path: Path, ranks: Ranks, rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far."""
    report = {
        "date": date.today().isoformat(),
        "machine": f"{cpu_model()}, {os.cpu_count()} CPUs, torch {torch.__version__}, {platform.machine()}",
        "ranks": ranks.world_size,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(report, indent=1).encode())


if __name__ == "__main__":
    main()
