"""The facts of a report as tables."""

from typing import TYPE_CHECKING, Any

from multihop.cluster.console import plain
from multihop.cluster.doctor.finding import ClusterReport, NodeReport, gigabytes

if TYPE_CHECKING:
    from rich.table import Table

_NONE = "-"


def nodes_table(report: ClusterReport) -> "Table":
    """A row a node."""
    from rich.table import Table

    table = Table(*_NODES, header_style="bold", box=None)
    for name, facts in report["nodes"].items():
        table.add_row(*map(plain, (name, *_cells(facts))))
    return table


def links_table(report: ClusterReport) -> "Table":
    """A row a link, a column a size of all-reduce, in MB/s that each rank sends."""
    from rich.table import Table

    sizes = sorted({int(size) for link in report["links"] for size in link.get("rates", {})})
    table = Table("all-reduce", *(f"{_size(size)}" for size in sizes), header_style="bold", box=None)
    for link in report["links"]:
        ends = link["nodes"]
        name = f"within {ends[0]}" if len(ends) == 1 else " - ".join(ends)
        rates = link.get("rates", {})
        cells = [f"{rates[str(size)] / 1e6:,.1f} MB/s" if str(size) in rates else "failed" for size in sizes]
        table.add_row(*map(plain, (name, *cells)))
    return table


_NODES = ("node", "clock", "memory", "shm", "disk", "files", "matmul", "write", "read")


def _cells(facts: NodeReport) -> tuple[str, ...]:
    machine, clock, compute = (facts.get(key, {"error": ""}) for key in ("machine", "clock", "compute"))
    if "error" in machine:
        return ("no answer", *[_NONE] * (len(_NODES) - 2))
    fullest = min(machine["disks"], key=lambda disk: disk["free"])
    return (
        _NONE if "error" in clock else f"{clock['ahead']:+.2f} s",
        gigabytes(machine["memory"]["available"]),
        gigabytes(machine["shm"]["free"]),
        gigabytes(fullest["free"]),
        str(machine["open_files"]),
        _NONE if "error" in compute else _devices(compute),
        _slowest(facts, "write_rate"),
        _slowest(facts, "read_rate"),
    )


def _devices(compute: dict[str, Any]) -> str:
    slowest = min(device["flops"] for device in compute["devices"])
    count = f"{len(compute['devices'])} x " if len(compute["devices"]) > 1 else ""
    return f"{count}{slowest / 1e9:,.0f} GFLOP/s"


def _slowest(facts: NodeReport, what: str) -> str:
    rates = [found[what] for found in facts.get("places", {}).values() if what in found]
    return f"{min(rates) / 1e6:,.0f} MB/s" if rates else _NONE


def _size(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"
