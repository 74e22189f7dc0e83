"""Predict the time of a step on this CPU from the operations that `multihop plan` counts, and measure it.

    python bench/cpu_step_time.py --json FILE

For a GPU the plan has a table of rates. Here such a table is measured, at three sizes of each family: what each kind of
operation takes for a call, for a byte and for a floating-point operation. The steps of five other sizes are predicted
with it. Two coefficients of each family are fitted to its steps at the first sizes: an overhead per call, mostly
Python, and a scale for its operations' times.

On a shared machine the same step can take half as long again for seconds or minutes, while others use the memory and
the caches. So a fixed reference, one Transformer layer forward and backward and operations on a large tensor, runs
before and after each step, for about as long as the step, and steps are measured as multiples of it. Every size is
measured once in each of several rounds, which are minutes apart, and the median counts; the seconds are those multiples
of the reference's median. Each measurement has a process of its own, because the updates of a process's later engines
were slower.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

FIRST = [(64, 2, 64, 8), (160, 2, 128, 4), (256, 3, 64, 16)]
OTHERS = [(96, 3, 96, 8), (128, 2, 64, 16), (192, 4, 64, 8), (256, 2, 128, 8), (320, 3, 64, 8)]
"""Hidden size, layers, sequence length and sequences of the sizes that are measured for the table, and of those that
are predicted."""
VOCABULARY = 4000
WARM_UP_S, MEASURED_S, MIN_STEPS, PROFILED = 0.3, 1.5, 7, 3
Result = TypeVar("Result")
Size = tuple[int, int, int, int]
Costs = dict[str, list[float]]
"""Calls, bytes and floating-point operations of each kind of operation."""


def config_of(family: str, size: Size) -> Any:
    """Return the recipe of a size."""
    from multihop.pretrain.config import TrainingConfig
    from multihop.pretrain.models.families import FAMILIES

    hidden, layers, length, sequences = size
    wanted = {"layers": 0 if family == "bag" else layers, "hidden": hidden, "heads": 2, "max_positions": 512}
    known = set(FAMILIES[family].config.model_fields) - ({"heads"} if family == "ctc-encoder" else set())
    return TrainingConfig.model_validate(
        {
            "model": {"family": family, **{key: value for key, value in wanted.items() if key in known}},
            "objective": {"name": FAMILIES[family].default_objective},
            "phases": [{"seq_len": length, "global_batch_size": sequences, "steps": 9, "lr": 1e-3}],
            "engine": {"deepspeed": {}, "micro_batch_size": sequences, "zero_stage": 0},
        }
    )


def count_operations(family: str, sizes: list[Size]) -> list[Costs]:
    """Return the operations of a step of each size, by their kind, without computing any."""
    from multihop.pretrain.plan.assumed_batch import assumed_batch
    from multihop.pretrain.plan.rank_trace import trace_rank

    found = []
    for size in sizes:
        config = config_of(family, size)
        batch = assumed_batch(config, 0, size[3], VOCABULARY)
        trace = trace_rank(config, VOCABULARY, None, [batch], size[3], 1, "cpu")
        costs: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for operation, count in (trace.micro_batches[0] + trace.update).items():
            name = "::".join(operation.name.split(".")[:2])
            for number, amount in enumerate((1.0, operation.bytes, operation.flops)):
                costs[name][number] += count * amount
        found.append(dict(costs))
    return found


def measure_step(family: str, size: Size, names: list[str] | None) -> dict[str, Any]:
    """Return the time of a step, and of each kind of operation if `names` has the kinds, relative to the reference.

    `reference_s` of the result has the reference's seconds, and `step` and `operations` are multiples of it.
    """
    import torch

    from multihop.common.machine import disable_malloc_trim
    from multihop.pretrain.engine.engine import Engine
    from multihop.pretrain.engine.ranks import join_process_group
    from multihop.pretrain.models.build import build_model_on_meta
    from multihop.pretrain.plan.assumed_batch import assumed_batch

    disable_malloc_trim()  # as a rank does
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ranks, config = join_process_group(), config_of(family, size)

    def init(_: str, parameter: torch.Tensor) -> None:
        torch.nn.init.normal_(parameter, std=0.02)

    batch = assumed_batch(config, 0, size[3], VOCABULARY)
    engine = Engine(config, build_model_on_meta(config.model, VOCABULARY), ranks, size[3], init)
    counts = {name: float(count) for name, count in batch.counts.items()}

    def step() -> None:
        engine.forward_backward(batch, counts)
        engine.step(1e-4)

    step()
    reference = make_reference()
    step_s = min(repeat(lambda: seconds_of(step), WARM_UP_S))
    reference_s = min(repeat(lambda: seconds_of(reference), WARM_UP_S))
    times = max(1, round(step_s / reference_s))

    def seconds_of_reference() -> float:
        return seconds_of(lambda: [reference() for _ in range(times)]) / times

    references, ratios = [seconds_of_reference()], []
    for seconds in repeat(lambda: (seconds_of(step), seconds_of_reference()), MEASURED_S):
        ratios.append(2 * seconds[0] / (references[-1] + seconds[1]))
        references.append(seconds[1])
    result: dict[str, Any] = {"step": statistics.median(ratios), "reference_s": statistics.median(references)}
    if names is not None:
        before = [seconds_of_reference() for _ in range(PROFILED)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(PROFILED):
                step()
        around = statistics.mean(before + [seconds_of_reference() for _ in range(PROFILED)])
        seconds_by_kind = seconds_by_name(profile.events(), set(names))
        result["operations"] = {name: seconds / around for name, seconds in seconds_by_kind.items()}
    engine.destroy()
    ranks.shutdown()
    return result


def make_reference() -> Callable[[], None]:
    """Return the work that steps are compared with: products, elementwise operations and Python, as in a step."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(128, 2, 512, batch_first=True)
    hidden, large = torch.randn(8, 64, 128), torch.randn(1_000_000)

    def reference() -> None:
        layer(hidden).sum().backward()
        large.mul(1.1).add(large).sum()

    return reference


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def repeat(call: Callable[[], Result], least_s: float) -> Iterator[Result]:
    """Yield the results of MIN_STEPS calls, and of more until `least_s` have passed."""
    began, calls = time.perf_counter(), 0
    while calls < MIN_STEPS or time.perf_counter() - began < least_s:
        yield call()
        calls += 1


def seconds_by_name(events: Any, names: set[str]) -> dict[str, float]:
    """Return the seconds of a step in each kind of operation, with those that it calls itself."""
    seconds: Counter[str] = Counter()
    for event in events:
        parent = event.cpu_parent
        while parent is not None and parent.name not in names:
            parent = parent.cpu_parent
        if event.name in names and parent is None:
            seconds[event.name] += event.cpu_time_total / 1e6 / PROFILED
    return dict(seconds)


def fit_table(costs: list[Costs], measured: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the seconds of a call, of a byte and of a floating-point operation for each kind that was measured."""
    table = {}
    for name in sorted({name for each in measured for name in each}):
        pairs = zip(costs, measured, strict=True)
        rows = [(each[name], seconds[name]) for each, seconds in pairs if name in each and name in seconds]
        table[name] = fit([row[0] for row in rows], [row[1] for row in rows]).tolist()
    return table


def fit(amounts: Sequence[Sequence[float] | NDArray[np.float64]], taken: Sequence[float]) -> NDArray[np.float64]:
    """Return the seconds of each amount, none negative, with the least squares of the relative errors.

    Args:
        amounts: (N, k).
        taken: the seconds of all amounts of a row together, (N,).
    """
    from scipy.optimize import nnls

    rows, seconds = np.array(amounts), np.array(taken)
    scales = np.maximum(rows.max(axis=0), 1e-12)
    fitted, _ = nnls(rows / scales / seconds[:, None], np.ones(len(rows)))
    result: NDArray[np.float64] = fitted / scales
    return result


def predict(costs: Costs, table: dict[str, list[float]]) -> float:
    """Return the seconds of all operations but those within others, which the profiler counts with them."""
    return sum(float(np.dot(amounts, table[name])) for name, amounts in costs.items() if name in table)


def median_of(rounds: list[dict[str, Any]], reference_s: float) -> dict[str, Any]:
    """Return the seconds of a step, and of each kind of operation if measured: the medians of all rounds."""
    result: dict[str, Any] = {"seconds": reference_s * statistics.median(each["step"] for each in rounds)}
    if "operations" in rounds[0]:
        names = rounds[0]["operations"]
        result["operations"] = {
            name: reference_s * statistics.median(each["operations"][name] for each in rounds) for name in names
        }
    return result


def spread(values: Sequence[float]) -> float:
    """Return by which fraction the largest value exceeds the smallest."""
    return max(values) / min(values) - 1


def print_spread(sizes: list[list[dict[str, Any]]]) -> None:
    """Print by how much the rounds of a size differ."""
    in_seconds = [spread([each["step"] * each["reference_s"] for each in tries]) for tries in sizes]
    as_multiples = [spread([each["step"] for each in tries]) for tries in sizes]
    print(
        f"between {len(sizes[0])} rounds the steps of a size differed by {statistics.median(in_seconds):.1%} in "
        f"seconds, and by {statistics.median(as_multiples):.1%} as multiples of the reference (medians of all sizes)"
    )


def main() -> None:
    """Measure, fit, predict and print."""
    from multihop.pretrain.models.families import FAMILIES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["deepspeed", "multihop.pretrain.engine.engine"])
    sizes = [*FIRST, *OTHERS]
    with ProcessPoolExecutor(1, mp_context=server, max_tasks_per_child=1) as processes:
        costs = {each: processes.submit(count_operations, each, sizes).result() for each in arguments.families}
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(
                {
                    family: [
                        processes.submit(measure_step, family, size, list(each) if size in FIRST else None).result()
                        for size, each in zip(sizes, costs[family], strict=True)
                    ]
                    for family in costs
                }
            )
            print(f"measured round {number + 1}", file=sys.stderr)
    of_size = {(family, i): [each[family][i] for each in rounds] for family in costs for i in range(len(sizes))}
    reference_s = statistics.median(each["reference_s"] for tries in of_size.values() for each in tries)
    steps = {family: [median_of(of_size[family, i], reference_s) for i in range(len(sizes))] for family in costs}
    first = range(len(FIRST))
    table = fit_table(
        [costs[family][i] for family in costs for i in first],
        [steps[family][i]["operations"] for family in costs for i in first],
    )
    results, errors = [], []
    for family in costs:
        parts = [
            np.array([predict(each, table), sum(amounts[0] for amounts in each.values())]) for each in costs[family]
        ]
        coefficients = fit([parts[i] for i in first], [steps[family][i]["seconds"] for i in first])
        cells = []
        for i in range(len(FIRST), len(sizes)):
            seconds, measured = float(parts[i] @ coefficients), steps[family][i]["seconds"]
            errors.append(abs(seconds / measured - 1))
            cells.append(f"{1e3 * measured:,.0f} ({seconds / measured:.2f})")
            results.append({"family": family, "size": sizes[i], "predicted_s": seconds, "measured_s": measured})
        print(f"| {family} | {' | '.join(cells)} |")
    kinds = {name for family in costs for i in first for name in costs[family][i]}
    print(f"{len(kinds - table.keys())} of {len(kinds)} kinds of operations were only seen within others: ", end="")
    print(", ".join(sorted(kinds - table.keys())))
    within = sum(error <= 0.15 for error in errors)
    print(
        f"milliseconds (predicted over measured): {within} of {len(errors)} within 15 %, median error "
        f"{statistics.median(errors):.1%}, largest {max(errors):.1%}"
    )
    if arguments.rounds > 1:
        print_spread(list(of_size.values()))
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"sizes": sizes, "results": results, "table": table, "costs": costs, "rounds": rounds}, indent=1)
        )


if __name__ == "__main__":
    main()
