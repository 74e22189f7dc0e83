"""The report's table of what was planned before each start of a training, beside what was measured."""

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from multihop.common.json_lines import Row, read_rows
from multihop.eval.report.render import TemplateContext
from multihop.eval.report.run_metrics import by_step
from multihop.pretrain.run.files import PLANS

_SPEED, _MFU, _MEMORY = "tokens_per_s", "mfu", "system/gpu_peak_memory_gb"
_Series = dict[str, dict[int, float]]
"""Fields of metrics.jsonl by step."""
_NONE = "-"
_NOTE = (
    "A row for each phase of each start. Measured: medians of the logged steps from that start until the next one, "
    "whatever number of ranks took them, and the peak of rank 0's GPU in these steps."
)


def plan_context(run_dir: Path, rows: Sequence[Row]) -> TemplateContext:
    """Return plans.jsonl for the template; nothing for a run that was not planned.

    Args:
        rows: those of metrics.jsonl.

    Raises:
        UserError: plans.jsonl is damaged.
    """
    plans = read_rows(run_dir / PLANS)
    measured = {name: by_step(rows, name) for name in (_SPEED, _MFU, _MEMORY)}
    starts = [*(plan["from_step"] for plan in plans), float("inf")]
    lines = [
        line
        for plan, (start, end) in zip(plans, pairwise(starts), strict=True)
        if "phases" in plan
        for line in _lines(plan, start, end, measured)
    ]
    return {"planned": lines, "planned_note": _NOTE}


def _lines(plan: Row, start: float, end: float, measured: _Series) -> Iterator[list[str]]:
    """Yield the lines of the phases with steps after `start` and, but for the last start, until `end`."""
    last = 0
    for phase in plan["phases"]:
        first, last = last, last + phase["steps"]
        if first < end and last > start:
            yield _line(plan, phase, max(first, start), min(last, end), measured)


def _line(plan: Row, phase: Row, first: float, last: float, measured: _Series) -> list[str]:
    """Return a line of the table: tokens per second, MFU and memory as planned, and as measured in the steps from
    `first` + 1 to `last`."""

    def logged(name: str) -> list[float]:
        return [value for step, value in measured[name].items() if first < step <= last]

    def median(name: str, form: str) -> str:
        values = logged(name)
        return format(statistics.median(values), form) if values else _NONE

    fits, memory = bool(phase["micro_batch_size"]), logged(_MEMORY)
    return [
        f"{first + 1:,.0f}",
        f"{plan['ranks']} x {' or '.join(plan['gpus'])}",
        str(phase["phase"]),
        f"{phase['tokens_per_s']:,.0f}" if fits else "does not fit",
        median(_SPEED, ",.0f"),
        f"{phase['mfu']:.0%}" if fits else _NONE,
        median(_MFU, ".0%"),
        f"{phase['peak_bytes'] / 1e9:,.1f} GB",
        f"{max(memory):,.1f} GB" if memory else _NONE,
    ]
