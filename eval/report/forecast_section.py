"""The report's table of what was forecast before a training started, beside what was measured."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multihop.common.errors import UserError
from multihop.common.json_lines import Row
from multihop.eval.report.render import TemplateContext
from multihop.eval.report.run_metrics import by_step
from multihop.pretrain.run.files import FORECAST

_MEMORY = "system/gpu_peak_memory_gb"
_NONE = "-"


def forecast_context(run_dir: Path, rows: Sequence[Row]) -> TemplateContext:
    """Return the rows of forecast.json for the template; nothing for a run without it.

    Args:
        rows: those of metrics.jsonl.

    Raises:
        UserError: forecast.json is damaged.
    """
    path = run_dir / FORECAST
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {"forecast": None}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it, and the report has no forecast") from None
    lines, first = [], 0
    for plan in found["phases"]:
        last = first + plan["steps"]
        lines.append(_line(plan, max(first, found["from_step"]), last, rows))
        first = last
    note = (
        f"Forecast before step {found['from_step'] + 1:,}, for {found['ranks']} x {found['gpu']}. Measured: medians of "
        "the steps that were logged since, and the peak of rank 0's GPU until the end of the phase."
    )
    return {"forecast": lines, "forecast_note": note}


def _line(plan: dict[str, Any], first: int, last: int, rows: Sequence[Row]) -> list[str]:
    """Number of the phase, then tokens per second, MFU and memory, each as forecast and as measured, in the steps
    after `first` until `last`."""

    def logged(name: str) -> list[float]:
        return [value for step, value in by_step(rows, name).items() if first < step <= last]

    def median(name: str, form: str) -> str:
        values = logged(name)
        return format(statistics.median(values), form) if values else _NONE

    fits, memory = bool(plan["micro_batch_size"]), logged(_MEMORY)
    return [
        str(plan["phase"]),
        f"{plan['tokens_per_s']:,.0f}" if fits else _NONE,
        median("tokens_per_s", ",.0f"),
        f"{plan['mfu']:.0%}" if fits else _NONE,
        median("mfu", ".0%"),
        f"{plan['peak_bytes'] / 1e9:,.1f} GB",
        f"{max(memory):,.1f} GB" if memory else _NONE,
    ]
