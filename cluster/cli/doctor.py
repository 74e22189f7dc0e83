"""The command `doctor`: checks a cluster or this machine, and prints tables and the problems."""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from multihop.cluster.cli.options import AsJson, Overrides
from multihop.common.errors import DONE, FAILED, UserError
from multihop.common.redaction import safe_text

if TYPE_CHECKING:
    from rich.table import Table

    from multihop.cluster.doctor.findings import ClusterReport, NodeReport
    from multihop.cluster.doctor.rounds import CheckRequest
    from multihop.cluster.runs.recipe import Recipe

doctor_command = typer.Typer()
_COLUMNS = ("node", "clock", "memory", "shm", "disk", "files", "matmul", "write", "read")
_NONE = "-"


@doctor_command.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Also check what this recipe needs.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_API_SERVER_ADDRESS", metavar="URL", help="Dashboard of the head. Default: this machine."
        ),
    ] = None,
    runs: Annotated[str | None, typer.Option(help="Directory of all runs: written and read by all nodes.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Check GPUs too; a node without one is a problem.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a cluster before a big job. Exit code 1: there are problems."""
    from multihop.cluster.jobs.submit import load_for_cluster
    from multihop.cluster.runs.recipe import load_recipe

    if recipe is None:
        loaded = None
    elif address is None:
        loaded = load_recipe(recipe, overrides or [])
    else:
        loaded = load_for_cluster(recipe, overrides or [], runs)
    raise typer.Exit(examine_and_show(address, loaded, runs, gpu, as_json))


def examine_and_show(
    address: str | None, recipe: "Recipe | None", runs: str | None, gpu: bool | None, as_json: bool
) -> int:
    """Print a table or JSON; returns the exit code: 0, or 1 if there are problems.

    Args:
        address: URL of a head's dashboard; None: the cluster of RAY_ADDRESS, else this machine.
        gpu: check GPUs, which each node must have; None: if the cluster has some.

    Raises:
        UserError: `runs` is relative on a cluster.
    """
    from multihop.cluster.doctor.examine import make_request
    from multihop.cluster.jobs.head_script import HeadScriptFailed

    if runs is not None and not runs.startswith(("/", "s3://")):
        if address is not None:
            raise UserError(f"--runs={runs} is relative; give the absolute path that all nodes of the cluster see")
        runs = str(Path(runs).absolute())
    try:
        report = _report(address, make_request(recipe, runs, gpu))
    except HeadScriptFailed as error:
        print(f"multihop: the cluster could not be checked: {safe_text(str(error))}", file=sys.stderr)
        return FAILED
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return FAILED if report["findings"] else DONE


def passes_checks(address: str, recipe: "Recipe", runs: str) -> bool:
    """Print the problems that concern the recipe; returns whether there are none."""
    return examine_and_show(address, recipe, runs, None, as_json=False) == DONE


def show(report: "ClusterReport") -> None:
    """Print a table of the nodes, one of the links, and the findings."""
    from rich.console import Console

    from multihop.cluster.console import plain

    out = Console()
    out.print(nodes_table(report))
    if report["links"]:
        out.print(links_table(report))
    if (step := report.get("step", {})) and "error" not in step:
        seconds = f"{step['first_s']:.0f} s, and after a restart {step['second_s']:.0f} s" if "first_s" in step else ""
        out.print(plain(f"a step of the recipe: {seconds or 'skipped: ' + step['skipped']}"))
    if not report["findings"]:
        out.print("no problems found")
    for finding in report["findings"]:
        text = f"{finding['node']}  {finding['check']}: {finding['seen']}; expected {finding['expected']}"
        out.print(plain(f"✗ {text}: {finding['advice']}"), soft_wrap=True)


def _report(address: str | None, request: "CheckRequest") -> "ClusterReport":
    from multihop.cluster.console import console, plain
    from multihop.cluster.doctor.examine import examine, examine_remotely
    from multihop.cluster.ray.jobs import Jobs

    def echo(line: str) -> None:
        console.print(plain(f"examining: {line}"))

    if address is not None:
        return examine_remotely(Jobs(address), request, echo)
    with redirect_stdout(sys.stderr):  # Ray prints messages about nodes at any time
        return examine(request, echo)


def nodes_table(report: "ClusterReport") -> "Table":
    """Return a table with a row for each node."""
    from rich.table import Table

    from multihop.cluster.console import plain

    table = Table(*_COLUMNS, header_style="bold", box=None)
    for name, node_report in report["nodes"].items():
        table.add_row(*map(plain, (name, *_cells(node_report))))
    return table


def links_table(report: "ClusterReport") -> "Table":
    """Return a table with a row for each link and a column for each size of all-reduce, in MB/s that each rank
    sends."""
    from rich.table import Table

    from multihop.cluster.console import plain

    sizes = sorted({int(size) for link in report["links"] for size in link.get("rates", {})})
    table = Table("all-reduce", *(f"{_size(size)}" for size in sizes), header_style="bold", box=None)
    for link in report["links"]:
        ends = link["nodes"]
        name = f"within {ends[0]}" if len(ends) == 1 else " - ".join(ends)
        rates = link.get("rates", {})
        cells = [f"{rates[str(size)] / 1e6:,.1f} MB/s" if str(size) in rates else "failed" for size in sizes]
        table.add_row(*map(plain, (name, *cells)))
    return table


def _cells(node_report: "NodeReport") -> tuple[str, ...]:
    from multihop.cluster.doctor.findings import format_gigabytes

    machine, clock, compute = (node_report.get(key, {"error": ""}) for key in ("machine", "clock", "compute"))
    if "error" in machine:
        return ("no answer", *[_NONE] * (len(_COLUMNS) - 2))
    fullest = min(machine["disks"], key=lambda disk: disk["free"])
    return (
        _NONE if "error" in clock else f"{clock['ahead']:+.2f} s",
        format_gigabytes(machine["memory"]["available"]),
        format_gigabytes(machine["shm"]["free"]),
        format_gigabytes(fullest["free"]),
        str(machine["open_files"]),
        _NONE if "error" in compute else _devices(compute),
        _slowest(node_report, "write_rate"),
        _slowest(node_report, "read_rate"),
    )


def _devices(compute: dict[str, Any]) -> str:
    slowest = min(device["flops"] for device in compute["devices"])
    count = f"{len(compute['devices'])} x " if len(compute["devices"]) > 1 else ""
    return f"{count}{slowest / 1e9:,.0f} GFLOP/s"


def _slowest(node_report: "NodeReport", what: str) -> str:
    rates = [answer[what] for answer in node_report.get("stores", {}).values() if what in answer]
    return f"{min(rates) / 1e6:,.0f} MB/s" if rates else _NONE


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
