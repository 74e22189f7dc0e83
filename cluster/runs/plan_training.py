"""Plans the rest of a training on the cluster's GPUs before it starts: a line on the console, and a row for the report.

The same plan is not made twice: a restart takes that of the last row of plans.jsonl, if what it depends on is equal.
"""

from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any

from multihop.cluster.console import console
from multihop.cluster.ray.capacity import has_gpus
from multihop.cluster.ray.gpus import ClusterGpus, gpus_of_cluster
from multihop.cluster.runs.planning import (
    STORE_BYTES_PER_S,
    caveats,
    check_precision,
    engine_setting,
    plans_of,
)
from multihop.cluster.runs.resolved import ResolvedRun
from multihop.common.errors import PlanningFailed, UserError
from multihop.common.files import sha256_json
from multihop.common.gpus import USABLE, Gpu, gpu_named
from multihop.common.json_lines import Row, append_row, read_rows
from multihop.eval.report.render import duration
from multihop.pretrain.plan.collectives import Links, links_of
from multihop.pretrain.run.files import PLANS

_GB = 1e9
_KEY_VERSION = 4
"""Changes with what a plan computes."""
_SECTIONS = {"model", "objective", "phases", "optimizer", "engine", "data"}
"""The sections of a recipe that a plan depends on, beside checkpoint.save_interval."""


def plan_training(run: ResolvedRun) -> None:
    """Print the time that is left, memory and what limits the speed, and append them to plans.jsonl.

    Does nothing if no node has a GPU: the time on a CPU is not predicted. If there is no plan, prints why; the
    training starts all the same.
    """
    if not has_gpus():
        return
    path = run.folder / PLANS
    try:
        rows = read_rows(path)
        row = _plan(run, gpus_of_cluster(), rows[-1] if rows else {})
    except (UserError, PlanningFailed) as error:
        append_row(path, {"from_step": run.step, "reason": str(error)})
        console.print(f"plan      none: {error}")
        return
    append_row(path, row)
    console.print(f"plan      {summary_of(row)}")
    for sentence in row["caveats"]:
        console.print(f"          {sentence}")


def _plan(run: ResolvedRun, cluster: ClusterGpus, last: Row) -> Row:
    """Plan all phases on as many ranks as the cluster has room for.

    Args:
        last: the last row of plans.jsonl.

    Raises:
        UserError: the GPUs are not known, or the recipe cannot be planned.
        PlanningFailed: the planning process failed.
    """
    recipe = run.recipe
    kinds = kinds_of(cluster)
    for kind in kinds:
        check_precision(recipe, kind)
    gpu = weakest_gpu(kinds)
    least, most = recipe.cluster.worker_range
    ranks = max(least, min(most, sum(cluster.free_by_node)))
    nodes = _count_nodes(ranks, cluster.free_by_node)
    setting = {"links": asdict(assumed_links(gpu, ranks, nodes)), "engine": engine_setting(recipe)}
    data = None if run.data is None else run.data.fingerprint
    training = recipe.model_dump(mode="json", include=_SECTIONS)
    key = sha256_json([_KEY_VERSION, training, recipe.checkpoint.save_interval, data, asdict(gpu), ranks, nodes])
    if last.get("key") == key:
        plans = last["phases"]
    else:
        prepared = str(run.data_folder), str(run.folder / "index")
        plans = list(plans_of(recipe, gpu, [setting], prepared, STORE_BYTES_PER_S))
    ends = accumulate(phase.steps for phase in recipe.phases)
    return {
        "key": key,
        "gpus": list(cluster.names),
        "ranks": ranks,
        "nodes": nodes,
        "from_step": run.step,
        "usable_bytes": USABLE * gpu.memory,
        "caveats": caveats(recipe),
        "phases": [plan | {"left_s": _left_s(plan, end - run.step)} for plan, end in zip(plans, ends, strict=True)],
    }


def kinds_of(cluster: ClusterGpus) -> list[Gpu]:
    """Return the kinds of the cluster's GPUs, at least one.

    Raises:
        UserError: a node does not name its GPUs, or one is not known.
    """
    if cluster.silent:
        raise UserError(f"nvidia-smi gave no names of GPUs on {'; '.join(cluster.silent)}")
    kinds = {name: gpu_named(name) for name in cluster.names}
    if unknown := [name for name, kind in kinds.items() if kind is None]:
        raise UserError(
            f"the GPUs {', '.join(unknown)} are not known; describe them to `multihop plan` by --gpu-memory, "
            "--gpu-tflops and --gpu-bandwidth"
        )
    if not kinds:
        raise UserError("nvidia-smi names no GPU")
    return [kind for kind in kinds.values() if kind is not None]


def weakest_gpu(kinds: list[Gpu]) -> Gpu:
    """Return the slowest of some kinds of GPUs, with the least memory and the lowest rates of all of them."""
    fields = [each for each in asdict(kinds[0]) if each != "name"]
    slowest = min(kinds, key=lambda kind: kind.achievable_flops)
    return replace(slowest, **{each: min(getattr(kind, each) for kind in kinds) for each in fields})


def assumed_links(gpu: Gpu, ranks: int, nodes: int) -> Links:
    """The links of ranks in so many nodes, which are assumed to have the bandwidth between them that GPUs have within
    one."""
    return replace(links_of(gpu, ranks, nodes), between_nodes=gpu.link)


def _left_s(plan: dict[str, Any], steps: int) -> float | None:
    """Seconds of what is left of a phase that ends after so many steps, of its saves and held-out evaluations in
    proportion; None: it does not fit."""
    if steps <= 0:
        return 0.0
    if not plan["micro_batch_size"]:
        return None
    seconds: float = min(steps * plan["step_s"], plan["phase_s"])
    return seconds + min(1.0, steps / plan["steps"]) * (plan["save_s"] + plan["eval_s"])


def _count_nodes(ranks: int, free_by_node: tuple[int, ...]) -> int:
    """The fewest nodes that have room for the ranks, or all."""
    enough = (nodes for nodes, gpus in enumerate(accumulate(free_by_node), start=1) if gpus >= ranks)
    return next(enough, len(free_by_node))


def summary_of(row: Row) -> str:
    """Return the plan of a row of plans.jsonl in a line."""
    gpus, usable = f"{row['ranks']} x {' or '.join(row['gpus'])}", row["usable_bytes"] / _GB
    phases = [phase for phase in row["phases"] if phase["left_s"] != 0.0]
    if misfits := [phase for phase in phases if phase["left_s"] is None]:
        worst = max(misfits, key=lambda phase: phase["peak_bytes"])
        return (
            f"{gpus}: phases[{worst['phase']}] does not fit, with {worst['peak_bytes'] / _GB:,.1f} of {usable:,.1f} GB "
            f"a GPU for micro-batches of {worst['traced_samples']}"
        )
    longest = max(phases, key=lambda phase: phase["left_s"])
    most = max(phase["peak_bytes"] for phase in phases) / _GB
    left = duration(sum(phase["left_s"] for phase in phases))
    line = f"{gpus}: {left} left, {most:,.1f} of {usable:,.1f} GB a GPU"
    if row["nodes"] > 1:
        return f"{line}, if the links between nodes are as fast as those within one"
    return f"{line}, limited by {longest['limited_by']}"
