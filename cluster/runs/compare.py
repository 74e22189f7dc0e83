"""Compare runs: differences between their recipes, and their results side by side."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from multihop.cluster.console import plain
from multihop.cluster.tracking.connection import store_uri
from multihop.cluster.tracking.fetch import fetch_run
from multihop.common.errors import UserError
from multihop.common.files import write_atomically
from multihop.common.redaction import safe_text
from multihop.eval.report.compared_runs import ComparedRun, comparable, read_runs
from multihop.eval.report.differences import METHOD, run_differences
from multihop.eval.report.plot_style import PAPER, as_png
from multihop.eval.report.plots import draw_lines
from multihop.eval.report.run_metrics import HEALTH, LOSS, PARTS, REFERENCES, heldout
from multihop.eval.statistics.formatting import spread

_LONGEST_NAME = 150
"""Characters of the names of runs in the name of a picture; file systems take 255 in all."""
_SUMMARY = (
    *("status", "steps", "tokens", "train_loss", *PARTS, *(heldout(name) for name in (LOSS, *PARTS)), *REFERENCES),
    *(*HEALTH, "tokens_per_s", "mfu"),
)
Rows = dict[str, list[str]]


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side; each list has one cell per run, in the order of `names`."""

    names: list[str]
    recipe: Rows
    """Keys of the recipe whose values differ, as JSON; "" for a recipe without the key."""
    results: Rows
    """Numbers of the summary, and each task's median over the seeds with minimum and maximum, at the settings with the
    best development score."""
    differences: list[str]
    """A sentence for each task that a run and the first one have."""
    notes: list[str]
    """Caveats about the runs' results, one sentence each."""
    heldout: list[dict[int, float]]
    """Held-out mlm_loss or clm_loss by step, in nats: the sum also depends on which other objective a run has."""


def find_runs(names: list[str], runs: Path, fetch: Callable[[str], Path] | None = None) -> list[Path]:
    """Return the run directories with these names or paths, each once: a run that is first may be in a pattern after
    it.

    Args:
        fetch: creates the directory of a run that does not exist locally.

    Raises:
        UserError: `names` has fewer than two entries, or a run does not exist.
    """
    if len(names) < 2:
        raise UserError(f"expected at least two runs, got {len(names)}; name another one")
    run_dirs = []
    for name in names:
        folders = [folder for folder in (runs / name, Path(name)) if (folder / "recipe.json").is_file()]
        if not folders and fetch is not None:
            folders = [fetch(name)]
        if not folders:
            existing = ", ".join(sorted(path.parent.name for path in runs.glob("*/recipe.json"))) or "none"
            raise UserError(f"no run {name} in {runs}; existing runs: {existing}")
        run_dirs.append(folders[0])
    return list(dict.fromkeys(run_dirs))


def compare(run_dirs: list[Path]) -> Comparison:
    """Compare runs by the files of their directories; results that a run does not have yet are empty.

    Raises:
        UserError: one of the files is damaged.
    """
    compared = read_runs(run_dirs)
    recipes = [run.keys for run in compared]
    results = [_results(run) for run in compared]
    return Comparison(
        names=[run.name for run in compared],
        recipe={
            key: [json.dumps(recipe[key]) if key in recipe else "" for recipe in recipes]
            for key in _keys(recipes)
            if key != "name" and any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)
        },
        results={key: [result.get(key, "") for result in results] for key in _keys(results)},
        differences=[f"{each.names[1]} against {each.names[0]}: {each.text}" for each in run_differences(compared)],
        notes=[*(note for run in compared for note in run.notes), *filter(None, [comparable(compared)])],
        heldout=[run.heldout_loss for run in compared],
    )


def show_comparison(names: list[str], runs: Path, tracking: str | None = None) -> None:
    """Print the comparison as a table and write `compare-A-B.png` to the current directory; of many runs
    `compare-A-and-15-others.png`.

    Args:
        tracking: MLflow's tracking URI, for runs that are not in `runs`.

    Raises:
        UserError: a run does not exist.
    """
    from rich.console import Console
    from rich.table import Column, Table

    with TemporaryDirectory() as fetched:
        fetch = partial(fetch_run, uri=store_uri(runs, tracking), folder=Path(fetched)) if tracking else None
        comparison = compare(find_runs(names, runs, fetch))
    columns = (Column(plain(name), overflow="fold") for name in ("", *comparison.names))
    table = Table(*columns, header_style="bold")
    for title, rows in (("recipe", comparison.recipe), ("results", comparison.results)):
        table.add_row(f"[bold]{title}[/bold]" if rows else f"[bold]{title}: no difference[/bold]")
        for key, cells in rows.items():
            table.add_row(*map(plain, (key, *cells)))
        table.add_section()
    console = Console()
    console.print(table)
    for line in comparison.differences:
        console.print(plain(line))
    if comparison.differences:
        console.print(METHOD)
    for note in comparison.notes:
        console.print(plain(note))
    if any(comparison.heldout):
        first, *others = comparison.names
        every = "-".join(comparison.names)
        named = every if len(every) <= _LONGEST_NAME else f"{first[-_LONGEST_NAME:]}-and-{len(others)}-others"
        picture = Path(f"compare-{named}.png".replace("/", "-"))
        lines = list(zip(comparison.names, comparison.heldout, strict=True))
        label = "held-out loss of the predicted tokens (nats)"
        write_atomically(picture, as_png(draw_lines(PAPER, [(label, lines)], "step")))
        print(f"wrote {safe_text(str(picture))}")


def _results(run: ComparedRun) -> dict[str, str]:
    cells = {key: _cell(run.summary[key]) for key in _SUMMARY if run.summary.get(key) is not None}
    for (task, init), choice in sorted(run.choices.items()):
        cells[f"{task} {choice.chosen.rows[0]['metric']}, {init}"] = spread(choice.chosen.values)
    return cells


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _keys(parts: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))
