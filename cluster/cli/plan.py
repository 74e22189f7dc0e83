"""The command `plan`: what a run would take on given GPUs, before it starts."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multihop.cluster.cli.options import AsJson, Overrides, RecipePath, Runs
from multihop.cluster.cli.plan_report import GB, cheapest_first, draw, failures_line, table_of, with_failures
from multihop.common.errors import UserError

if TYPE_CHECKING:
    from multihop.cluster.runs.recipe import Recipe
    from multihop.common.gpus import Gpu

plan_command = typer.Typer()
_ASSUMED = (
    "The data is not prepared: every sample is assumed to have all tokens of its phase, and the vocabulary the "
    "recipe's size."
)
_ACHIEVABLE, _ATTENTION, _PROCESSORS, _PCIE = 0.8, 0.5, 100, 64e9
"""Of a GPU that is not known: the share of its rate that matrix products reach, the share of that which attention
reaches, its multiprocessors, and the bytes per second between two of them, by PCIe 5."""
_USABLE = 0.9
"""Share of a GPU's memory for tensors; the rest is for CUDA, NCCL and what the allocator cannot use."""


@plan_command.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Number of GPUs, or several numbers to compare, such as 8,16,32.")
    ] = "8",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="Kind of GPU, for example H100 or A100-80.")] = "H100",
    gpu_memory: Annotated[
        float | None, typer.Option(metavar="GB", min=1, help="Memory of a GPU, if it is another or not known.")
    ] = None,
    gpu_tflops: Annotated[
        float | None, typer.Option(metavar="TFLOPS", min=1, help="Dense bf16 rate of a GPU that is not known.")
    ] = None,
    gpu_bandwidth: Annotated[
        float | None, typer.Option(metavar="GB/S", min=1, help="Memory bandwidth of a GPU that is not known.")
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
        bool, typer.Option("--sweep", help="Try all ZeRO stages and kinds of activation checkpointing.")
    ] = False,
    failures: Annotated[
        float, typer.Option(metavar="RATE", min=0.0, help="Failures of a thousand nodes in a day.")
    ] = 5.0,
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
    from multihop.cluster.runs.inspect_step import index_folder_of, prepared_data
    from multihop.cluster.runs.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    kind = _gpu_of(gpu, gpu_memory, gpu_tflops, gpu_bandwidth)
    numbers = _numbers(gpus)
    nodes_of = {number: max(1, round(number * nodes / max(numbers))) for number in numbers}
    settings = [
        {
            "world_size": number,
            "bus_bandwidth": _bus_bandwidth(kind, number, nodes_of[number], network),
            "engine": engine,
        }
        for number in numbers
        for engine in _engine_settings(loaded, sweep)
    ]
    _check_samples(loaded, max(numbers))
    data = prepared_data(loaded, runs)
    with index_folder_of(runs / loaded.name) as index:
        prepared = None if data is None else (str(data), str(index))
        plans = list(_plans(loaded, kind, settings, prepared))
    for each in plans:
        each["hours"] = each["steps"] * each["step_s"] / 3600
        each["cost"] = None if price is None else each["hours"] * each["gpus"] * price
    plans = cheapest_first(plans)
    cheapest = plans[0]["gpus"]
    failing = with_failures(plans, nodes_of[cheapest], failures, store * GB)
    if picture is not None:
        draw(plans, price, picture)
    if as_json:
        found = {"gpu": gpu, "nodes": nodes, "memory_bytes": kind.memory, "plans": plans, "with_failures": failing}
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console

    out = Console(width=None if sys.stdout.isatty() else 1000)
    out.print(table_of(plans, f"{loaded.name} on {kind.name}", kind.memory))
    line = None if failing is None else failures_line(failing, cheapest, price)
    if line is not None:
        out.print(line)
    if data is None:
        out.print(_ASSUMED)


def _gpu_of(name: str, memory_gb: float | None, tflops: float | None, bandwidth_gb: float | None) -> "Gpu":
    from multihop.common.gpus import GPUS, Gpu, gpu_named

    known = gpu_named(name)
    if known is not None:
        return known if memory_gb is None else replace(known, memory=memory_gb * GB)
    if memory_gb is None or tflops is None or bandwidth_gb is None:
        raise UserError(
            f"--gpu={name} is not known; give one of {', '.join(GPUS)}, or describe it by --gpu-memory GB, "
            "--gpu-tflops TFLOPS and --gpu-bandwidth GB/S"
        )
    flops = tflops * 1e12
    achievable = _ACHIEVABLE * flops
    return Gpu(name, flops, achievable, _ATTENTION * achievable, memory_gb * GB, bandwidth_gb * GB, _PROCESSORS, _PCIE)


def _bus_bandwidth(gpu: "Gpu", gpus: int, nodes: int, network_gbit: float | None) -> float:
    """Bytes that a rank sends in a second in collectives of all ranks."""
    if gpus % nodes:
        raise UserError(f"--gpus={gpus} cannot be divided among --nodes={nodes}; give a multiple of it")
    if nodes == 1:
        return gpu.link
    if network_gbit is None:
        raise UserError(f"--nodes={nodes} need the bandwidth between them; give it as --network GBIT")
    return min(gpu.link, network_gbit * 1e9 / 8) if gpus > nodes else network_gbit * 1e9 / 8


def _check_samples(recipe: "Recipe", gpus: int) -> None:
    for number, phase in enumerate(recipe.phases):
        if phase.global_batch_tokens is None and phase.global_batch_size < gpus:
            raise UserError(
                f"--gpus={gpus} are more GPUs than samples of a step: phases[{number}].global_batch_size="
                f"{phase.global_batch_size}; give fewer GPUs, or raise it"
            )


def _numbers(gpus: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in gpus.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise UserError(f"--gpus={gpus} is no number of GPUs; give one, such as 8, or several, such as 8,16,32")
    return numbers


def _engine_settings(recipe: "Recipe", sweep: bool) -> list[dict[str, Any]]:
    """The keys of the `engine` section to try."""
    engine = recipe.engine
    stages = [engine.zero_stage]
    if sweep:
        stages = [3] if engine.offload == "optimizer+weights" else [1, 2, 3]
    kinds = ["none", "selective", "full"] if sweep else [engine.activation_checkpointing]
    return [
        {"zero_stage": stage, "activation_checkpointing": kind, "offload": engine.offload, "compile": False}
        for stage, kind in itertools.product(stages, kinds)
    ]


def _plans(
    recipe: "Recipe", gpu: "Gpu", settings: list[dict[str, Any]], prepared: tuple[str, str] | None
) -> Iterator[dict[str, Any]]:
    from multihop.pretrain.config import TrainingConfig

    sections = recipe.model_dump(mode="json", include=set(TrainingConfig.model_fields))
    request = {
        "recipe": sections,
        "settings": settings,
        "vocabularies": _vocabularies(recipe, prepared),
        "prepared": prepared,
        "gpu": asdict(gpu),
        "limit_bytes": _USABLE * gpu.memory,
    }
    command = [sys.executable, "-m", "multihop.pretrain.plan.worker"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert worker.stdin is not None and worker.stdout is not None
    json.dump(request, worker.stdin)
    worker.stdin.close()
    for line in worker.stdout:
        yield json.loads(line)
    if worker.wait():
        raise RuntimeError(f"the plan's process ended with exit code {worker.returncode}; see its messages above")


def _vocabularies(recipe: "Recipe", prepared: tuple[str, str] | None) -> tuple[int, int | None]:
    """Sizes of the vocabularies of what is predicted and, if it is another, of the sources of pairs."""
    from multihop.data_prep.dataset.manifest import read_data_manifest
    from multihop.data_prep.tokenizers.existing import import_tokenizer
    from multihop.data_prep.tokenizers.tokenizer import describe

    if prepared is not None:
        manifest = read_data_manifest(Path(prepared[0]))
        return manifest.output_tokenizer.vocab_size, manifest.source_vocab_size
    tokenizer, pairs = recipe.tokenizer, recipe.data.holds_pairs
    if tokenizer.path is None:
        return tokenizer.vocab_size, tokenizer.vocab_size if tokenizer.separate_vocabularies else None
    content = import_tokenizer(tokenizer.path, tokenizer.lowercase, pairs)
    added = tokenizer.add_words + len(tokenizer.added_tokens)
    return describe(content, "", pairs).vocab_size + added, None
