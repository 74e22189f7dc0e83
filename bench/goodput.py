"""Simulate long runs on nodes that fail: `python bench/goodput.py --pictures docs`.

Prints the goodput of a model of 8.3 billion parameters on 8 to 16,384 GPUs, what each measure against failures
contributes, the best interval between saves beside Young's and Daly's, and what the simulation says of published runs.
Rates and times are assumptions, those below and those that the tables print; nothing is measured here.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from multihop.pretrain.plan.goodput import (
    Nodes,
    Outcome,
    Recovery,
    best_interval,
    daly_interval,
    simulate,
    young_interval,
)

DAY = 86_400.0
GPUS = (8, 64, 512, 1_024, 4_096, 16_384)
GPUS_PER_NODE = 8
FAILURES = 5.0
"""Failures per 1,000 node-days: between BLOOM's 3 and OPT-175B's 15."""
CHECKPOINT = 12 * 8.3e9
NODE_STORE, STORE = 1e9, 100e9
"""Bytes per second that a node writes, and that the store takes in all."""
COPY = 20e9
"""Bytes per second that a GPU copies into its host's memory."""
WORK_S = 30 * DAY
SEEDS = range(20)
MEASURES = (
    "spare nodes",
    "failures detected in 10 s, not 10 min",
    "asynchronous saves",
    "standby workers",
    "continuing with fewer nodes",
)


def nodes_of(gpus: int, measures: Sequence[str]) -> Nodes:
    """The nodes; 1 of 32 more are spare, at least one."""
    count = gpus // GPUS_PER_NODE
    spares = max(1, count // 32) if "spare nodes" in measures else 0
    return Nodes(count, FAILURES / 1000, rack=4, rack_share=0.05, spares=spares)


def recovery_of(gpus: int, measures: Sequence[str]) -> Recovery:
    """What a run does about failures. A start of the ranks takes 30 s with standby workers, else 120 s."""
    write_s = CHECKPOINT / min(STORE, NODE_STORE * gpus / GPUS_PER_NODE)
    copy_s = CHECKPOINT / gpus / COPY
    is_asynchronous = "asynchronous saves" in measures
    return Recovery(
        save_interval_s=WORK_S,
        save_pause_s=copy_s if is_asynchronous else copy_s + write_s,
        save_write_s=write_s if is_asynchronous else 0.0,
        detect_s=10.0 if MEASURES[1] in measures else 600.0,
        restart_s=(30.0 if "standby workers" in measures else 120.0) + write_s,  # reading takes as long as writing
        fewest_nodes=1 if "continuing with fewer nodes" in measures else None,
    )


def simulated(nodes: Nodes, recovery: Recovery, work_s: float = WORK_S) -> list[Outcome]:
    return [simulate(nodes, recovery, work_s, seed) for seed in SEEDS]


def row_of(gpus: int, measures: Sequence[str]) -> dict[str, Any]:
    """A run with its best interval between saves."""
    nodes, recovery = nodes_of(gpus, measures), recovery_of(gpus, measures)
    interval = best_interval(nodes, recovery, WORK_S, SEEDS)
    outcomes = simulated(nodes, replace(recovery, save_interval_s=interval))
    mean = DAY / (nodes.count * nodes.failures_per_day)
    return {
        "gpus": gpus,
        "measures": list(measures),
        "failures": float(np.mean([each.failures for each in outcomes])),
        "save_interval_s": interval,
        "young_s": young_interval(recovery.save_pause_s, mean),
        "daly_s": daly_interval(recovery.save_pause_s, mean),
        "pause_s": recovery.save_pause_s,
        "write_s": recovery.save_write_s,
        "days": np.percentile([each.seconds / DAY for each in outcomes], (10, 50, 90)).tolist(),
        "goodput": float(np.mean([each.goodput(WORK_S) for each in outcomes])),
    }


def published() -> list[tuple[str, str, str]]:
    """Published runs: what is assumed, what the simulation says, and what was published."""
    llama = Nodes(2_048, 3.8 / 1000, spares=64)
    found = []
    for restart_s in (180.0, 600.0):
        outcomes = simulated(llama, Recovery(1800.0, 5.0, 30.0, 60.0, restart_s), 49 * DAY)
        failures, goodput = (np.mean([getattr(each, key) for each in outcomes]) for key in ("failures", "seconds"))
        found.append(
            (
                "Llama 3: 2,048 nodes and 64 spare, 3.8 failures per 1,000 node-days, saved every 30 min with a pause "
                "of 5 s and a write of 30 s, detected in 1 min, "
                f"restarted in {restart_s / 60:.0f} min",
                f"{failures:.0f} failures in {goodput / DAY:.1f} days, goodput {49 * DAY / goodput:.1%}",
                "419 in 54 days, over 90 % effective",
            )
        )
    bloom = simulated(Nodes(48, 3 / 1000, spares=4), Recovery(3 * 3600.0, 40.0, 0.0, 600.0, 600.0), 105 * DAY)
    found.append(
        (
            "BLOOM: 48 nodes and 4 spare, 3 per 1,000 node-days, a save of 40 s every 3 h, detected and restarted in "
            "20 min",
            f"{np.mean([each.failures for each in bloom]):.0f} failures, "
            f"{np.mean([each.lost_s / max(1, each.failures) for each in bloom]) / 3600:.1f} h lost by each, "
            f"goodput {np.mean([each.goodput(105 * DAY) for each in bloom]):.1%}",
            "a GPU a week in 3.5 months",
        )
    )
    gaps = np.sort(np.random.default_rng(1).exponential(60 / 90, (1_000, 90)), axis=1)[:, -3:][:, ::-1].mean(axis=0)
    found.append(
        (
            "OPT-175B: 90 restarts in 60 days at a constant rate",
            f"the longest times without one {', '.join(f'{each:.1f}' for each in gaps)} days",
            "2.8, 2 and 1.5 days",
        )
    )
    return found


def two_rates() -> str:
    """Meta's two mean times to failure by a rate for each node, and by that and a rate of the run."""
    few, many, small, large = 7.9 / 24, 1.8 / 24, 1_024 / 8, 16_384 / 8
    by_node = 1 / many / large
    with_run = (1 / many - 1 / few) / (large - small)
    return (
        f"RSC-1's 7.9 h on 1,024 GPUs and 1.8 h on 16,384: {by_node * 1000:.1f} failures per 1,000 node-days give "
        f"{24 / (by_node * small):.1f} h on 1,024 ({1 / (by_node * small) / few - 1:.0%} too long); "
        f"{with_run * 1000:.1f} and {1 / few - with_run * small:.1f} a day of each run give both."
    )


def with_replacement() -> str:
    """Failures at homogeneous and heterogeneous rates, if nodes that fail often are replaced by others."""
    recovery = replace(recovery_of(16_384, MEASURES), save_interval_s=130.0)
    texts = []
    for spread in (0.0, 1.5):
        for after in (None, 3, 2, 1):
            nodes = replace(nodes_of(16_384, MEASURES), spread=spread, replaced_after=after, rack_share=0.0)
            failures = np.mean([each.failures for each in simulated(nodes, recovery)])
            texts.append(f"| {spread} | {'never' if after is None else after} | {failures:.0f} |")
    return "\n".join(texts)


def draw(rows: list[dict[str, Any]], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for number in range(len(MEASURES) + 1):
        line = [row for row in rows if row["measures"] == list(MEASURES[:number])]
        label = f"and {MEASURES[number - 1]}" if number else "none of these"
        left.plot([row["gpus"] for row in line], [100 - 100 * row["goodput"] for row in line], marker="o", label=label)
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="time lost, %")
    left.set(xticks=GPUS, xticklabels=[f"{each:,}" for each in GPUS])
    left.legend(fontsize=7)
    measures = MEASURES[:2]
    for gpus in (1_024, 16_384):
        nodes, recovery = nodes_of(gpus, measures), recovery_of(gpus, measures)
        mean = DAY / (nodes.count * nodes.failures_per_day)
        daly = daly_interval(recovery.save_pause_s, mean)
        intervals = np.geomspace(daly / 8, daly * 8, 25)
        means = [
            100 * (1 - np.mean([each.goodput(WORK_S) for each in simulated(nodes, at_interval)]))
            for at_interval in (replace(recovery, save_interval_s=float(value)) for value in intervals)
        ]
        (line,) = right.plot(intervals / 60, means, label=f"{gpus:,} GPUs, saves of {recovery.save_pause_s:.0f} s")
        right.axvline(daly / 60, color=line.get_color(), linestyle=":")
    right.set(xscale="log", xlabel="minutes between saves; dotted: Daly's formula", ylabel="time lost, %")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "goodput.png", dpi=120)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, help="directory for goodput.png")
    parser.add_argument("--json", type=Path, default=Path("bench/results/goodput.json"))
    options = parser.parse_args()
    rows = [row_of(gpus, MEASURES[:number]) for gpus in GPUS for number in range(len(MEASURES) + 1)]
    print("| GPUs | failures | none | +", " | +".join(MEASURES), "| days with all (10 to 90 %) |")
    print("|---" * (len(MEASURES) + 4) + "|")
    for gpus in GPUS:
        line = [row for row in rows if row["gpus"] == gpus]
        cells = " | ".join(f"{row['goodput']:.1%}" for row in line)
        low, middle, high = line[-1]["days"]
        print(f"| {gpus:,} | {line[0]['failures']:.1f} | {cells} | {middle:.1f} ({low:.1f} to {high:.1f}) |")
    without = [row_of(gpus, [other for other in MEASURES if other != each]) for gpus in GPUS[3:] for each in MEASURES]
    print("\n| without |", " | ".join(f"{gpus:,} GPUs" for gpus in GPUS[3:]), "|")
    print("|---" * (len(GPUS[3:]) + 1) + "|")
    complete = {row["gpus"]: row["goodput"] for row in rows if len(row["measures"]) == len(MEASURES)}
    for each in MEASURES:
        lost = [100 * (complete[row["gpus"]] - row["goodput"]) for row in without if each not in row["measures"]]
        print(f"| {each} |", " | ".join(f"-{value:.1f} points" for value in lost), "|")
    print("\n| GPUs | pause of a save, s | best interval, min | Young | Daly |\n|---|---|---|---|---|")
    for row in rows:
        if row["measures"] == list(MEASURES[:2]):
            times = " | ".join(f"{row[key] / 60:.1f}" for key in ("save_interval_s", "young_s", "daly_s"))
            print(f"| {row['gpus']:,} | {row['pause_s']:.1f} | {times} |")
    print("\n| run | simulated | published |\n|---|---|---|")
    for texts in published():
        print("|", " | ".join(texts), "|")
    print(f"\n{two_rates()}")
    print("\n| spread of the logarithms of rates | replaced after failures | failures of 2,048 nodes in 30 days |")
    print(f"|---|---|---|\n{with_replacement()}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"rows": rows, "without": without}, indent=1))
    if options.pictures is not None:
        draw(rows, options.pictures)


if __name__ == "__main__":
    main()
