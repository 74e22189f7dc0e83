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
from multihop.common.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from multihop.cluster.runs.recipe import Recipe
    from multihop.common.gpus import Gpu

plan_command = typer.Typer()
_GB = 1e9
_SETTINGS = ("zero_stage", "activation_checkpointing", "offload", "compile")
"""The keys of the `engine` section that a setting sets."""
_ASSUMED = (
    "The data is not prepared: every sample is assumed to have all tokens of its phase, and the vocabulary the "
    "recipe's size."
)
_ACHIEVABLE, _ATTENTION, _PROCESSORS, _PCIE = 0.8, 0.5, 100, 64e9
"""Of a GPU that is not known: the share of its rate that matrix products reach, the share of that which attention
reaches, its multiprocessors, and the bytes per second between two of them, by PCIe 5."""
_USABLE = 0.9
"""Share of a GPU's memory for tensors; the rest is for CUDA, NCCL and what the allocator cannot use."""
_STATE_BYTES = 12
"""Bytes of a checkpoint for each parameter: weight and two moments in fp32."""
_COPY_BYTES_PER_S = 20e9
"""Rate at which a rank copies what it saves into the host's memory. An assumption."""
_RESTART_S = 60.0
"""From the end of the ranks to the first step, without reading the checkpoint. An assumption; bench/recovery.py
measured 8 s on two hosts."""
_SIMULATED = 50
"""Simulated runs."""
_FEWEST_FAILURES = 0.01
"""Below this expected number the failures of a run are not worth a line."""
_PERCENTILES = (10, 50, 90)


@plan_command.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="Number of GPUs.")] = 8,
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
    nodes: Annotated[int, typer.Option(min=1, metavar="M", help="Number of nodes that they are in.")] = 1,
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
    as_json: AsJson = False,
) -> None:
    """Predict the memory, time and cost of a run before it starts."""
    from multihop.cluster.runs.inspect_step import index_folder_of, prepared_data
    from multihop.cluster.runs.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    kind = _gpu_of(gpu, gpu_memory, gpu_tflops, gpu_bandwidth)
    bandwidth = _bus_bandwidth(kind, gpus, nodes, network)
    _check_samples(loaded, gpus)
    data = prepared_data(loaded, runs)
    with index_folder_of(runs / loaded.name) as index:
        prepared = None if data is None else (str(data), str(index))
        rows = list(_plans(loaded, gpus, kind, bandwidth, _settings(loaded, sweep), prepared))
    for row in rows:
        row["hours"] = row["steps"] * row["step_s"] / 3600
        row["cost"] = None if price is None else row["hours"] * gpus * price
    rows = _cheapest_first(rows)
    with_failures = _with_failures(rows, nodes, gpus, failures, store * _GB)
    if as_json:
        found = {"gpu": gpu, "gpus": gpus, "nodes": nodes, "memory_bytes": kind.memory, "plans": rows}
        print(json.dumps({**found, "with_failures": with_failures}, indent=1))
        return
    from rich.console import Console

    out = Console(width=None if sys.stdout.isatty() else 1000)
    out.print(_table(rows, f"{loaded.name} on {gpus} x {kind.name}", kind.memory))
    if with_failures is not None and with_failures["failures"] >= _FEWEST_FAILURES:
        out.print(_failures_line(with_failures, gpus, price))
    if data is None:
        out.print(_ASSUMED)


def _with_failures(
    rows: list[dict[str, Any]], nodes: int, gpus: int, failures: float, store_bytes_per_s: float
) -> dict[str, Any] | None:
    """The first setting on nodes that fail; None if it does not fit, or nothing fails."""
    import numpy as np

    from multihop.pretrain.plan.goodput import Nodes, Recovery, daly_interval, simulate

    chosen = [row for row in rows if all(row[key] == rows[0][key] for key in _SETTINGS)]
    if failures == 0 or not all(row["micro_batch_size"] for row in chosen):
        return None
    work_s = 3600 * sum(row["hours"] for row in chosen)
    size = _STATE_BYTES * rows[0]["parameters"]
    cluster = Nodes(nodes, failures / 1000)
    save_s = size / store_bytes_per_s
    pause_s = size / gpus / _COPY_BYTES_PER_S
    interval = max(daly_interval(pause_s, 86_400_000 / (nodes * failures)), save_s)  # a save at a time
    recovery = Recovery(interval, pause_s, save_s, restart_s=_RESTART_S + save_s)
    outcomes = [simulate(cluster, recovery, work_s, seed) for seed in range(_SIMULATED)]
    return {
        "failures_per_1000_node_days": failures,
        "checkpoint_bytes": size,
        "save_interval_s": interval,
        "failures": work_s / 86_400 * nodes * failures / 1000,
        "hours": np.percentile([each.seconds / 3600 for each in outcomes], _PERCENTILES).tolist(),
        "goodput": float(np.mean([each.goodput(work_s) for each in outcomes])),
    }


def _failures_line(found: dict[str, Any], gpus: int, price: float | None) -> str:
    low, middle, high = found["hours"]
    cost = "" if price is None else f", for {middle * gpus * price:,.0f}"
    return (
        f"At {found['failures_per_1000_node_days']:g} failures of a thousand nodes in a day, {found['failures']:.2g} "
        f"are expected. Saved every {found['save_interval_s'] / 60:,.0f} min ({found['checkpoint_bytes'] / _GB:,.1f} "
        f"GB), the run takes {middle:,.1f} h ({low:,.1f} to {high:,.1f}){cost}: a goodput of {found['goodput']:.1%}."
    )


def _gpu_of(name: str, memory_gb: float | None, tflops: float | None, bandwidth_gb: float | None) -> "Gpu":
    from multihop.common.gpus import GPUS, Gpu, gpu_named

    known = gpu_named(name)
    if known is not None:
        return known if memory_gb is None else replace(known, memory=memory_gb * _GB)
    if memory_gb is None or tflops is None or bandwidth_gb is None:
        raise UserError(
            f"--gpu={name} is not known; give one of {', '.join(GPUS)}, or describe it by --gpu-memory GB, "
            "--gpu-tflops TFLOPS and --gpu-bandwidth GB/S"
        )
    flops = tflops * 1e12
    achievable = _ACHIEVABLE * flops
    return Gpu(
        name, flops, achievable, _ATTENTION * achievable, memory_gb * _GB, bandwidth_gb * _GB, _PROCESSORS, _PCIE
    )


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


def _cheapest_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The phases of each setting together: those of which all fit first, the fastest of them first."""

    def rank(row: dict[str, Any]) -> tuple[bool, float]:
        same = [other for other in rows if all(other[key] == row[key] for key in _SETTINGS)]
        return not all(other["micro_batch_size"] for other in same), sum(other["hours"] for other in same)

    return sorted(rows, key=rank)


def _settings(recipe: "Recipe", sweep: bool) -> list[dict[str, Any]]:
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
    recipe: "Recipe",
    gpus: int,
    gpu: "Gpu",
    bus_bandwidth: float,
    settings: list[dict[str, Any]],
    prepared: tuple[str, str] | None,
) -> Iterator[dict[str, Any]]:
    from multihop.pretrain.config import TrainingConfig

    sections = recipe.model_dump(mode="json", include=set(TrainingConfig.model_fields))
    request = {
        "recipe": sections,
        "settings": settings,
        "world_size": gpus,
        "vocabularies": _vocabularies(recipe, prepared),
        "prepared": prepared,
        "gpu": asdict(gpu),
        "limit_bytes": _USABLE * gpu.memory,
        "bus_bandwidth": bus_bandwidth,
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


def _table(rows: list[dict[str, Any]], title: str, memory: float) -> "Table":
    from rich.table import Table

    columns = ("phase", "seq_len", "ZeRO", "checkpointing", "micro-batch", "accumulation", "memory", "step time")
    table = Table(*columns, "tokens/s", "MFU", "time", "cost", title=title, box=None)
    for row in rows:
        fits = row["micro_batch_size"] > 0
        first = (str(row["phase"]), str(row["seq_len"]), str(row["zero_stage"]), row["activation_checkpointing"])
        used = f"{row['peak_bytes'] / _GB:.1f} of {memory / _GB:.0f} GB"
        if not fits:
            table.add_row(*first, "does not fit", "", used)
            continue
        table.add_row(
            *first,
            str(row["micro_batch_size"]),
            str(row["micro_batches"]),
            used,
            f"{row['step_s'] * 1000:,.0f} ms",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.0%}",
            f"{row['hours']:,.1f} h",
            "" if row["cost"] is None else f"{row['cost']:,.0f}",
        )
    return table
