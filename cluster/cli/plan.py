"""The command `plan`: what a run would take on given GPUs, before it starts."""

import itertools
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multihop.cluster.cli.options import AsJson, Overrides, RecipePath, Runs
from multihop.cluster.cli.plan_report import (
    GB,
    cheapest_first,
    draw,
    failures_line,
    fits,
    hours_of,
    outside_line,
    table_of,
    table_of_memory,
    table_of_probe,
    with_failures,
)
from multihop.common.errors import UserError
from multihop.common.gpus import PCIE_5, USABLE

if TYPE_CHECKING:
    from multihop.cluster.runs.recipe import Recipe
    from multihop.common.gpus import Gpu

plan_command = typer.Typer()
_ASSUMED = (
    "The data is not prepared: every sample is assumed to have all tokens of its phase, and the vocabulary the "
    "recipe's size."
)
_DIVISORS = [2, 4]
"""A sweep also tries the largest micro-batch that fits divided by these."""
_PICTURES = (".png", ".svg", ".pdf")
_ACHIEVABLE, _FP32, _ATTENTION, _PROCESSORS = 0.8, 1 / 16, 0.5, 100
"""Of a GPU that is not known: the share of its bf16 rate that matrix products reach, that of fp32, the share of the
former which attention reaches, and its multiprocessors."""


_OF_A_PREDICTION = (
    "gpu",
    "gpu_memory",
    "gpu_tflops",
    "gpu_bandwidth",
    "network",
    "sweep",
    "failures",
    "store",
    "picture",
)
"""Parameters of `plan` that mean nothing with --probe, which measures one setting on the machine at hand."""


@plan_command.command()
def plan(
    ctx: typer.Context,
    recipe: RecipePath,
    overrides: Overrides = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N…]",
            help="Number of GPUs, or several numbers to compare, such as 8,16,32. Default: 8, with --probe 1.",
            show_default=False,
        ),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Time twenty real steps of a rank on this machine's GPU or CPU instead.")
    ] = False,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Kind of GPU, for example H100 or A100-80.")] = "H100",
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GB", min=1, help="Memory of a GPU, if it is another or not known.")
    ] = None,
    gpu_tflops: Annotated[
        float | None,
        typer.Option(metavar="TFLOPS", min=1, help="Dense bf16 rate of a GPU, if it is another or not known."),
    ] = None,
    gpu_bandwidth: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=1, help="Memory bandwidth of a GPU, if it is another or not known."),
    ] = None,
    nodes: Annotated[
        int, typer.Option(min=1, metavar="M", help="Number of nodes that the largest number of GPUs is in.")
    ] = 1,
    network: Annotated[
        float | None, typer.Option(metavar="GBIT", min=0.1, help="Gigabits per second between two nodes.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0.0, help="Price of a GPU for an hour, in any currency.")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Try each ZeRO stage that the recipe's precision, offload and DeepSpeed keys allow, each kind of "
            "activation checkpointing and, with engine.micro_batch_size=auto, smaller micro-batches.",
        ),
    ] = False,
    failures: Annotated[float, typer.Option(metavar="RATE", min=0.0, help="Failures per 1,000 node-days.")] = 5.0,
    store: Annotated[
        float, typer.Option(metavar="GB/S", min=0.001, help="Bandwidth at which all ranks together write a checkpoint.")
    ] = 1.0,
    runs: Runs = Path("runs"),
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the cost of each setting that fits against its time.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the memory, time and cost of a run before it starts."""
    from multihop.cluster.console import progress_line
    from multihop.cluster.runs.find_data import index_folder_of, prepared_data
    from multihop.cluster.runs.planning import caveats, check_precision, plans_of
    from multihop.cluster.runs.recipe import load_recipe
    from multihop.pretrain.plan.collectives import links_of

    loaded = load_recipe(recipe, overrides or [])
    figures = {"--failures": failures, "--store": store, "--price": price, "--network": network}
    figures |= {"--gpu-memory": gpu_memory, "--gpu-tflops": gpu_tflops, "--gpu-bandwidth": gpu_bandwidth}
    for option, value in figures.items():
        if value is not None and not math.isfinite(value):
            raise UserError(f"{option}={value} is not finite; give a number")
    if probe:
        given = [name for name in _OF_A_PREDICTION if _is_given(ctx, name)]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UserError(f"--probe measures one setting on this machine; remove {options}")
        _probe(loaded, _numbers(gpus or "1"), nodes, runs, price, as_json)
        return
    kind = described_gpu(gpu, gpu_memory, gpu_tflops, gpu_bandwidth)
    numbers = _numbers(gpus or "8")
    if picture is not None and (picture.suffix not in _PICTURES or not picture.parent.is_dir()):
        raise UserError(f"--picture={picture} must be a {', '.join(_PICTURES)} file in a directory that exists")
    check_precision(loaded, kind)
    nodes_of = _nodes_of(numbers, nodes)
    if nodes == 1 and network is not None:
        raise UserError(f"--network={network:g} is the bandwidth between nodes; give their number as --nodes M")
    if nodes > 1 and network is None:
        raise UserError(f"--nodes={nodes} need the bandwidth between them; give it as --network GBIT")
    settings = [
        {
            "links": asdict(links_of(kind, number, nodes_of[number], network or 0.0)),
            "engine": engine,
            "micro_batch_divisors": _DIVISORS if sweep and loaded.engine.micro_batch_size == "auto" else [],
        }
        for number in numbers
        for engine in _engine_settings(loaded, sweep)
    ]
    data = prepared_data(loaded, runs)
    _check_samples(loaded, max(numbers), data is not None)
    with index_folder_of(runs / loaded.name) as index:
        prepared = None if data is None else (str(data), str(index))
        total = sum(1 + len(each["micro_batch_divisors"]) for each in settings) * len(loaded.phases)
        plans = []
        with progress_line("plan") as progress:
            for each in plans_of(loaded, kind, settings, prepared, store * GB):
                plans.append(each)
                if sweep:
                    progress.update(len(plans), total)
    for each in plans:
        each["hours"] = hours_of(each)
        each["cost"] = None if price is None or each["hours"] is None else each["hours"] * each["gpus"] * price
    plans = cheapest_first(plans)
    cheapest = plans[0]["gpus"]
    fewest = _fewest_nodes(loaded, cheapest, nodes_of[cheapest])
    failing = with_failures(plans, nodes_of[cheapest], failures, store * GB, fewest)
    if as_json:
        found = {"gpu": gpu, "nodes": nodes, "memory_bytes": kind.memory, "plans": plans, "with_failures": failing}
        print(json.dumps(found, indent=1))
        _draw(plans, price, picture)
        return
    from rich.console import Console

    out = Console(width=None if sys.stdout.isatty() else 1000)
    out.print(table_of(plans, f"{loaded.name} on {kind.name}", USABLE * kind.memory))
    out.print(table_of_memory(plans))
    for line in (outside_line(plans), None if failing is None else failures_line(failing, cheapest, price)):
        if line is not None:
            out.print(line)
    if data is None:
        out.print(_ASSUMED)
    for sentence in caveats(loaded):
        out.print(sentence)
    _draw(plans, price, picture)


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _fewest_nodes(recipe: "Recipe", gpus: int, nodes: int) -> int:
    """Number of nodes of a plan that the run needs to continue: all of them, unless cluster.workers is a range."""
    fewest, most = recipe.cluster.worker_range
    return nodes if fewest == most else math.ceil(min(fewest, gpus) / (gpus / nodes))


def _probe(recipe: "Recipe", numbers: list[int], nodes: int, runs: Path, price: float | None, as_json: bool) -> None:
    """Print what real steps on this machine say of a run on several such devices."""
    from rich.console import Console

    from multihop.cluster.runs.find_data import index_folder_of, prepared_data
    from multihop.cluster.runs.planning import probe_phases

    if len(numbers) > 1:
        raise UserError(f"--gpus={','.join(map(str, numbers))}: --probe measures one setting; give one number")
    (ranks,) = numbers
    nodes = _nodes_of(numbers, nodes)[ranks]
    data = prepared_data(recipe, runs)
    _check_samples(recipe, ranks, data is not None)
    with index_folder_of(runs / recipe.name) as index:
        prepared = None if data is None else (str(data), str(index))
        phases = list(probe_phases(recipe, ranks, nodes, prepared))
    for each in phases:
        each["hours"] = [seconds / 3600 for seconds in each["phase_s"]] if each["micro_batch_size"] else None
        each["cost"] = None if price is None or each["hours"] is None else each["hours"][1] * ranks * price
    if as_json:
        print(json.dumps({"ranks": ranks, "phases": phases}, indent=1))
        return
    out = Console(width=None if sys.stdout.isatty() else 1000)
    out.print(table_of_probe(phases, recipe.name, ranks))
    if ranks > 1:
        out.print("Steps of one rank: what ranks send to each other is not in the times.")
    if data is None:
        out.print(_ASSUMED)


def _draw(plans: list[dict[str, Any]], price: float | None, picture: Path | None) -> None:
    if picture is None:
        return
    if not fits(plans, plans[0]):
        raise UserError("nothing fits, so there is nothing to draw; see the table")
    draw(plans, price, picture)


def described_gpu(name: str, memory_gb: float | None, tflops: float | None, bandwidth_gb: float | None) -> "Gpu":
    """The GPU of this name with the figures that are given; all its rates change in proportion to `tflops`.

    Raises:
        UserError: it is not known, and figures are missing.
    """
    from multihop.common.gpus import GPUS, Gpu, gpu_named

    if not name.strip():
        raise UserError(f"--gpu={name!r} is empty; give a name")
    known = gpu_named(name)
    if known is not None:
        ratio = 1.0 if tflops is None else tflops * 1e12 / known.flops
        rates = ("flops", "fp32_flops", "achievable_flops", "attention_flops")
        return replace(
            known,
            memory=known.memory if memory_gb is None else memory_gb * GB,
            bandwidth=known.bandwidth if bandwidth_gb is None else bandwidth_gb * GB,
            **{name: ratio * getattr(known, name) for name in rates},
        )
    if memory_gb is None or tflops is None or bandwidth_gb is None:
        raise UserError(
            f"--gpu={name} is not known; give one of {', '.join(GPUS)}, or describe it by --gpu-memory GB, "
            "--gpu-tflops TFLOPS and --gpu-bandwidth GB/S"
        )
    flops = tflops * 1e12
    achievable = _ACHIEVABLE * flops
    fp32 = _FP32 * flops
    return Gpu(
        name, flops, fp32, achievable, _ATTENTION * achievable, memory_gb * GB, bandwidth_gb * GB, _PROCESSORS, PCIE_5
    )


def _check_samples(recipe: "Recipe", gpus: int, is_prepared: bool) -> None:
    """Check that each rank has a sample in each step; how many pairs have so many tokens, prepared data decides."""
    for number, phase in enumerate(recipe.phases):
        tokens = phase.global_batch_tokens
        if tokens is None and phase.global_batch_size < gpus:
            raise UserError(
                f"--gpus={gpus} exceeds phases[{number}].global_batch_size={phase.global_batch_size}; give fewer GPUs, "
                "or raise it"
            )
        if tokens is not None and not is_prepared and tokens // phase.seq_len < gpus:
            raise UserError(
                f"--gpus={gpus} exceeds the {tokens // phase.seq_len} pairs of seq_len={phase.seq_len} tokens that "
                f"phases[{number}].global_batch_tokens={tokens} has room for; give fewer GPUs, raise it, or prepare "
                "the data if its pairs are shorter"
            )


def _nodes_of(numbers: list[int], nodes: int) -> dict[int, int]:
    """The number of nodes that each number of GPUs is in."""
    most = max(numbers)
    if most % nodes:
        raise UserError(f"--gpus={most} cannot be divided among --nodes={nodes}; give a multiple of it")
    found = {number: math.ceil(number * nodes / most) for number in numbers}
    for number, count in found.items():
        if number % count:
            raise UserError(
                f"--gpus={number} cannot be divided among {count} nodes of {most // nodes} GPUs; give a multiple of "
                f"{most // nodes}, or no more than that"
            )
    return found


def _numbers(gpus: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in gpus.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UserError(f"--gpus must be a positive integer, or several, such as 8,16,32; got {gpus}")
    return numbers


def _engine_settings(recipe: "Recipe", sweep: bool) -> list[dict[str, Any]]:
    """The keys of the `engine` section to try."""
    from multihop.cluster.runs.planning import engine_setting

    setting = engine_setting(recipe)
    if not sweep:
        return [setting]
    stages = [3] if setting["offload"] == "optimizer+weights" else [1, 2, 3]
    if recipe.engine.precision == "fp32" and setting["offload"] == "none":
        stages.insert(0, 0)
    allowed = [stage for stage in stages if _allows_stage(recipe, stage)]
    kinds = ["none", "selective", "full"]
    return [
        {**setting, "zero_stage": stage, "activation_checkpointing": kind}
        for stage, kind in itertools.product(allowed, kinds)
    ]


def _allows_stage(recipe: "Recipe", zero_stage: int) -> bool:
    """Whether the recipe's DeepSpeed keys may be set in this ZeRO stage; the recipe's own stage is tried in any case,
    so that a mistake in them is reported."""
    from multihop.pretrain.engine.deepspeed_config import fill_deepspeed_config

    changed = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"zero_stage": zero_stage})})
    assert isinstance(recipe.engine.deepspeed, dict)  # load_recipe has read it
    try:
        fill_deepspeed_config(recipe.engine.deepspeed, changed, recipe.engine.micro_batch_size)
    except UserError:
        return zero_stage == recipe.engine.zero_stage
    return True
