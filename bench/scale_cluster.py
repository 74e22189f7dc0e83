"""Measure how the driver, the rendezvous, the trials and the tracking grow: `python bench/scale_cluster.py trials`.

Each subcommand runs the project's own code on real files, sockets or stores of growing size, and prints the CPU and
wall seconds of each part and the exponent of its growth between the two largest sizes (1: in proportion to the size).
Each size has a process of its own, whose peak memory is printed as well. CPU seconds depend less than wall seconds on
other work on the machine.

- trials: n rows of results.jsonl, as one evaluation with a large grid, or of the same 50 trials of n / 50 checkpoints.
- mlflow: a run and its trials in a SQLite store that has n runs already.
- rendezvous: n ranks, simulated by threads, that find each other through the store of rank 0.
- driver: the driver's files and objects with n ranks.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""part, size, cpu_s, wall_s; or part, size and a number of bytes."""

SUBJECTS = {
    "trials": ("scale_trials", [1_000, 10_000, 100_000]),
    "mlflow": ("scale_mlflow", [100, 1_000, 10_000]),
    "rendezvous": ("scale_ranks", [64, 256, 1_024]),
    "driver": ("scale_ranks", [64, 256, 1_024]),
}
"""By subcommand: the module beside this one with a function `measure_SUBCOMMAND(size, parts)`, and the sizes."""


class Parts:
    """The measurements of one size, by the name of the part."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: list[Row] = []

    @contextmanager
    def of(self, part: str, times: int = 1) -> Iterator[None]:
        """Measure the block, which does the part `times` times."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.rows.append(
            {
                "part": part,
                "size": self.size,
                "cpu_s": (time.process_time() - cpu) / times,
                "wall_s": (time.perf_counter() - wall) / times,
            }
        )

    def number(self, part: str, number: float) -> None:
        """Record a number that is no time, such as a file's bytes."""
        self.rows.append({"part": part, "size": self.size, "number": number})


def main() -> None:
    """Print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--sizes", type=int, nargs="+", default=None)
    parser.add_argument("--json", type=Path, default=None, help="default: bench/results/scale-SUBJECT.json")
    options = parser.parse_args()
    sizes = options.sizes or SUBJECTS[options.subject][1]
    rows = [row for size in sizes for row in in_own_process(options.subject, size)]
    report = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "subject": options.subject,
        "results": rows,
    }
    file = options.json or Path(f"bench/results/scale-{options.subject}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['machine']}; CPU s / wall s\n")
    print(table(rows, sizes))


def in_own_process(subject: str, size: int) -> list[Row]:
    """Measure one size in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, subject, size).result()


def _measure(subject: str, size: int) -> list[Row]:
    parts = Parts(size)
    measure: Callable[[int, Parts], None] = getattr(importlib.import_module(SUBJECTS[subject][0]), f"measure_{subject}")
    measure(size, parts)
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    parts.number("peak memory (MB)", int(peak[1]) / 1000)
    return parts.rows


def table(rows: list[Row], sizes: list[int]) -> str:
    """Return a Markdown table with a line for each part."""
    lines = [
        f"| | {' | '.join(f'{size:,}' for size in sizes)} | exponent |",
        f"|---{'|---:' * (len(sizes) + 1)}|",
    ]
    for part in dict.fromkeys(row["part"] for row in rows):
        by_size = {row["size"]: row for row in rows if row["part"] == part}
        cells = [_cell(by_size[size]) if size in by_size else "" for size in sizes]
        lines.append(f"| {part} | {' | '.join(cells)} | {exponent(by_size)} |")
    return "\n".join(lines)


def exponent(by_size: dict[int, Row]) -> str:
    """Return the growth between the two largest sizes, of the CPU seconds or of the number; "" for a single size."""
    points = sorted((size, row.get("cpu_s", row.get("number", 0.0))) for size, row in by_size.items())[-2:]
    if len(points) < 2 or min(value for _, value in points) <= 0:
        return ""
    (small, before), (large, after) = points
    return f"{math.log(after / before) / math.log(large / small):.2f}"


def _cell(row: Row) -> str:
    if "number" in row:
        return f"{row['number']:,.4g}" if row["number"] < 1000 else f"{row['number']:,.0f}"
    return f"{_seconds(row['cpu_s'])} / {_seconds(row['wall_s'])}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 1 else f"{seconds:,.1f}" if seconds < 100 else f"{seconds:,.0f}"


if __name__ == "__main__":
    main()
