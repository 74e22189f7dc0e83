"""What the rest of a training will take on the cluster's GPUs: a line before it starts, and a file for its report."""

import json
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from multihop.cluster.console import console
from multihop.cluster.ray.capacity import has_gpus
from multihop.cluster.runs.planning import PlanningFailed, engine_setting, plans_of
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.common.errors import UserError
from multihop.common.files import write_atomically
from multihop.common.gpus import USABLE, gpu_named
from multihop.eval.report.render import duration
from multihop.pretrain.run.files import FORECAST

if TYPE_CHECKING:
    from multihop.cluster.ray.gpus import ClusterGpus

_GB = 1e9


def forecast_training(run: ResolvedRun) -> None:
    """Print time, memory and what limits the speed, and write forecast.json; without GPUs nothing, because the time
    on a CPU is not predicted. A training starts also without a forecast, and the line says why there is none."""
    if not has_gpus():
        return
    from multihop.cluster.ray.gpus import gpus_of_cluster

    try:
        found = _forecast(run, gpus_of_cluster())
    except (UserError, PlanningFailed) as error:
        console.print(f"forecast  none: {error}")
        return
    write_atomically(run.folder / FORECAST, json.dumps(found, indent=1).encode() + b"\n")
    console.print(f"forecast  {_line(found)}")


def _forecast(run: ResolvedRun, cluster: "ClusterGpus") -> dict[str, Any]:
    """Plan the phases that are left on as many ranks as the cluster may give them.

    Raises:
        UserError: the GPUs are not known, or the recipe cannot be planned.
        PlanningFailed: see there.
    """
    recipe = run.recipe
    kinds = [gpu_named(name) for name in cluster.names]
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        names = ", ".join(name for name, kind in zip(cluster.names, kinds, strict=True) if kind is None)
        raise UserError(
            f"the GPUs ({names or 'nvidia-smi gave no name'}) are not known; describe them to `multihop plan` by "
            "--gpu-memory, --gpu-tflops and --gpu-bandwidth"
        )
    slowest = min(known, key=lambda kind: kind.achievable_flops)
    least, most = recipe.cluster.worker_range
    ranks = max(least, min(most, sum(cluster.by_node)))
    setting = {"world_size": ranks, "bus_bandwidth": slowest.link, "engine": engine_setting(recipe)}
    ends = list(accumulate(phase.steps for phase in recipe.phases))
    phases = []
    for plan, end in zip(plans_of(recipe, slowest, [setting], _prepared(run)), ends, strict=True):
        left = min(max(0, end - run.step), plan["steps"])
        fits = bool(plan["micro_batch_size"])
        plan["left_s"] = min(left * plan["step_s"], plan["phase_s"]) if fits else None
        phases.append(plan)
    return {
        "gpu": slowest.name,
        "ranks": ranks,
        "nodes": _nodes_of(ranks, cluster.by_node),
        "from_step": run.step,
        "usable_bytes": USABLE * slowest.memory,
        "phases": phases,
    }


def _prepared(run: ResolvedRun) -> tuple[str, str]:
    return str(run.data_folder), str(run.folder / "index")


def _nodes_of(ranks: int, by_node: tuple[int, ...]) -> int:
    """The fewest nodes that have as many GPUs, or all."""
    return next((n for n, gpus in enumerate(accumulate(by_node), 1) if gpus >= ranks), len(by_node))


def _line(found: dict[str, Any]) -> str:
    phases = [phase for phase in found["phases"] if phase["left_s"] != 0]  # None: it does not fit
    gpus, usable = f"{found['ranks']} x {found['gpu']}", found["usable_bytes"] / _GB
    if misfits := [phase for phase in phases if phase["left_s"] is None]:
        worst = max(misfits, key=lambda phase: phase["peak_bytes"])
        return (
            f"{gpus}: phases[{worst['phase']}] does not fit, with {worst['peak_bytes'] / _GB:,.1f} of {usable:,.1f} GB "
            f"a GPU for micro-batches of {worst['traced_samples']}"
        )
    longest = max(phases, key=lambda phase: phase["left_s"])
    most = max(phase["peak_bytes"] for phase in phases) / _GB
    left = duration(sum(phase["left_s"] for phase in phases))
    line = f"{gpus}: {left} left, {most:,.1f} of {usable:,.1f} GB a GPU, limited by {longest['limited_by']}"
    return line if found["nodes"] == 1 else f"{line}; without the time that nodes take to send each other data"
