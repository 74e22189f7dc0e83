"""What `multihop plan` shows: a table, a picture, and the same run on nodes that fail."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

GB = 1e9
SETTINGS = ("gpus", "zero_stage", "activation_checkpointing", "micro_batch")
"""The keys of a plan that distinguish settings; a setting has a plan for each phase."""
_SIMULATED = 50
"""Simulated runs."""
_QUANTILES = (0.1, 0.5, 0.9)
_MOST = 20.0
"""A run that takes so many times its work is not simulated further."""
_FEWEST_FAILURES = 0.01
"""Below this expected number the failures of a run are not worth a line."""
_SHORT_S = 120.0
"""Below this an interval between saves is shown in seconds."""
_FEWEST_OUTSIDE = 0.01
"""Below this share of the time its saves and held-out evaluations are not worth a line."""


def cheapest_first(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The phases of each setting together: those of which all fit first, those with the fewest GPU hours first."""

    def rank(plan: dict[str, Any]) -> tuple[bool, float]:
        if not fits(plans, plan):
            return True, 0.0
        return False, sum(other["hours"] * other["gpus"] for other in _same_setting(plans, plan))

    return sorted(plans, key=rank)


def fits(plans: list[dict[str, Any]], plan: dict[str, Any]) -> bool:
    """Whether all phases of a plan's setting fit."""
    return all(other["micro_batch_size"] for other in _same_setting(plans, plan))


def _same_setting(plans: list[dict[str, Any]], plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [other for other in plans if _setting(other) == _setting(plan)]


def hours_of(plan: dict[str, Any]) -> float | None:
    """Hours of a phase with its saves and held-out evaluations; None: it does not fit."""
    parts = [plan[key] for key in ("phase_s", "save_s", "eval_s")]
    return None if None in parts else float(sum(parts)) / 3600


def outside_line(plans: list[dict[str, Any]]) -> str | None:
    """The shares of the first setting's time in which it saves and evaluates; None if they are small, or it does not
    fit."""
    chosen = _same_setting(plans, plans[0])
    if not fits(plans, plans[0]):
        return None
    total = 3600 * sum(plan["hours"] for plan in chosen)
    saves, evaluation = (sum(plan[key] for plan in chosen) / total for key in ("save_s", "eval_s"))
    if max(saves, evaluation) < _FEWEST_OUTSIDE:
        return None
    return f"Of the time, waiting for saves takes {saves:.1%}, and held-out evaluation {evaluation:.1%}."


def with_failures(
    plans: list[dict[str, Any]], nodes: int, failures: float, store_bytes_per_s: float, fewest_nodes: int
) -> dict[str, Any] | None:
    """The first setting on nodes that fail; None if it does not fit, or nothing fails.

    Args:
        failures: Failures per 1,000 node-days.
        store_bytes_per_s: Rate at which all ranks together write a checkpoint.
        fewest_nodes: The fewest nodes on which the run continues; with fewer, it waits until one is repaired.
    """
    import numpy as np

    from multihop.pretrain.plan.goodput import Nodes, Recovery, daly_interval, simulate

    chosen = _same_setting(plans, plans[0])
    if failures == 0 or not fits(plans, plans[0]):
        return None
    work_s = sum(plan["phase_s"] + plan["eval_s"] for plan in chosen)  # the simulation has saves of its own
    size, pause_s = plans[0]["checkpoint_bytes"], plans[0]["save_pause_s"]
    cluster = Nodes(nodes, failures / 1000)
    save_s = size / store_bytes_per_s
    interval = max(daly_interval(pause_s, 86_400_000 / (nodes * failures)), save_s)  # a save at a time
    recovery = Recovery(interval, pause_s, save_s, restart_s=Recovery.restart_s + save_s, fewest_nodes=fewest_nodes)
    outcomes = [simulate(cluster, recovery, work_s, seed, _MOST * work_s) for seed in range(_SIMULATED)]
    hours = np.quantile([each.seconds / 3600 for each in outcomes], _QUANTILES, method="nearest").tolist()
    return {
        "failures_per_1000_node_days": failures,
        "checkpoint_bytes": size,
        "save_interval_s": interval,
        "failures": work_s / 86_400 * nodes * failures / 1000,
        "hours": [None if math.isinf(each) else each for each in hours],
        "repair_h": cluster.repair_s / 3600,
        "is_elastic": fewest_nodes < nodes,
        "goodput": float(np.mean([each.goodput(work_s) for each in outcomes])),
    }


def failures_line(found: dict[str, Any], gpus: int, price: float | None) -> str | None:
    """The result of `with_failures` in a sentence; None if hardly a failure is expected."""
    if found["failures"] < _FEWEST_FAILURES:
        return None
    repair = f"{found['repair_h']:g} h"
    then = f"continues with fewer nodes for {repair}" if found["is_elastic"] else f"waits {repair} for the node"
    head = (
        f"At {found['failures_per_1000_node_days']:g} failures per 1,000 node-days, {found['failures']:.2g} are "
        f"expected; after each, the run {then}. "
    )
    if None in found["hours"]:
        return f"{head}It may not end within {_MOST:g} times its work: raise --store, or train on fewer nodes."
    low, middle, high = found["hours"]
    cost = "" if price is None else f", for {middle * gpus * price:,.0f}"
    interval_s = found["save_interval_s"]
    interval = f"{interval_s:,.0f} s" if interval_s < _SHORT_S else f"{interval_s / 60:,.0f} min"
    return (
        f"{head}If it is saved every {interval} ({found['checkpoint_bytes'] / GB:,.1f} GB), the run takes "
        f"{middle:,.1f} h ({low:,.1f} to {high:,.1f}){cost}: a goodput of {found['goodput']:.1%}."
    )


def table_of(plans: list[dict[str, Any]], title: str, usable: float) -> "Table":
    """A row for each phase of each setting; those that do not fit have the reason.

    Args:
        usable: Bytes of a GPU for tensors.
    """
    from rich.table import Table

    columns = ("GPUs", "phase", "seq_len", "ZeRO", "checkpointing", "micro-batch", "accumulation", "memory")
    table = Table(*columns, "step time", "limited by", "tokens/s", "MFU", "time", "cost", title=title, box=None)
    for plan in plans:
        first = [str(plan[key]) for key in ("gpus", "phase", "seq_len", "zero_stage", "activation_checkpointing")]
        if not plan["micro_batch_size"]:
            table.add_row(*first, "does not fit", "", _reason(plan, usable))
            continue
        table.add_row(
            *first,
            str(plan["micro_batch_size"]),
            str(plan["micro_batches"]),
            f"{plan['peak_bytes'] / GB:.1f} of {usable / GB:.0f} GB",
            f"{plan['step_s'] * 1000:,.0f} ms",
            plan["limited_by"],
            f"{plan['tokens_per_s']:,.0f}",
            f"{plan['mfu']:.0%}",
            f"{plan['hours']:,.1f} h",
            "" if plan["cost"] is None else f"{plan['cost']:,.0f}",
        )
    return table


def table_of_memory(plans: list[dict[str, Any]]) -> "Table":
    """Peak memory of a GPU by category, in each phase of the first setting."""
    from rich.table import Table

    chosen = [plan for plan in plans if _setting(plan) == _setting(plans[0])]
    names = [name for name in chosen[0]["peak_by_category"] if any(plan["peak_by_category"][name] for plan in chosen)]
    gpus, stage, checkpointing, micro_batch = _setting(chosen[0])
    title = f"Peak GB: {gpus} GPUs, ZeRO {stage}, checkpointing {checkpointing}, micro-batch {micro_batch}"
    table = Table("phase", *(name.replace("_", " ") for name in names), "total", title=title, box=None)
    for plan in chosen:
        sizes = [*(plan["peak_by_category"][name] for name in names), plan["peak_bytes"]]
        table.add_row(str(plan["phase"]), *(f"{size / GB:,.2f}" for size in sizes))
    return table


def table_of_probe(phases: list[dict[str, Any]], name: str, ranks: int) -> "Table":
    """A row for each phase, with what was measured from the 10th to the 90th percentile."""
    from rich.table import Table

    columns = ("ranks", "phase", "seq_len", "micro-batch", "accumulation", "memory, planned", "step time", "tokens/s")
    table = Table(*columns, "MFU", "time", "cost", title=f"{name} on this machine", box=None)
    for phase in phases:
        first = [str(ranks), str(phase["phase"])]
        memory = f"{phase['bytes'] / GB:,.1f} of {phase['limit_bytes'] / GB:,.1f} GB"
        if not phase["micro_batch_size"]:
            table.add_row(*first, "", "does not fit", "", memory)
            continue
        low, middle, high = (1000 * seconds for seconds in phase["step_s"])
        least, hours, most = phase["hours"]
        table.add_row(
            *first,
            str(phase["seq_len"]),
            str(phase["micro_batch_size"]),
            str(phase["micro_batches"]),
            memory,
            f"{middle:,.0f} ms ({low:,.0f} to {high:,.0f})",
            f"{phase['tokens_per_s']:,.0f}",
            f"{phase['mfu']:.0%}",
            f"{hours:,.1f} h ({least:,.1f} to {most:,.1f})",
            "" if phase["cost"] is None else f"{phase['cost']:,.0f}",
        )
    return table


def draw(plans: list[dict[str, Any]], price: float | None, out: Path) -> None:
    """Draw the cost of each setting that fits against its time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    settings = dict.fromkeys(map(_setting, plans))
    for setting in settings:
        same = [plan for plan in plans if _setting(plan) == setting]
        if not fits(plans, same[0]):
            continue
        gpus, stage, checkpointing, micro_batch = setting
        hours = sum(plan["hours"] for plan in same)
        cost = hours * gpus * (1.0 if price is None else price)
        axes.plot(hours, cost, "o")
        name = f"{gpus} GPUs, ZeRO {stage}, {checkpointing}, micro-batch {micro_batch}"
        axes.annotate(name, (hours, cost), fontsize=7)
    axes.set(xlabel="hours", ylabel="GPU hours" if price is None else "cost", xscale="log")
    figure.tight_layout()
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _setting(plan: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(plan[key] for key in SETTINGS)


def _reason(plan: dict[str, Any], usable: float) -> str:
    state, peak = plan["between_steps"]["device"] / GB, plan["peak_bytes"] / GB
    if state > usable / GB:
        return f"{state:,.1f} of {usable / GB:.0f} GB without any sample"
    return f"{peak:,.1f} of {usable / GB:.0f} GB with micro-batches of {plan['traced_samples']:,}, {state:,.1f} without"
