"""What differed in the recipes of several runs beside what differed in their results."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.progress import plain
from cluster.summary import read_summary
from data_prep.files import read_json_object, replacing
from data_prep.rows import read_rows
from data_prep.shown import shown
from eval.verdict import newest_rows
from pretrain.changes import flatten

_SUMMED_UP = ("status", "steps", "tokens", "train_loss", "heldout_loss", "unigram_loss", "tokens_per_s", "mfu")
Rows = dict[str, list[str]]


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side; each list holds a cell a run, in the order of `names`."""

    names: list[str]
    recipe: Rows
    """Keys of the recipe whose values differ, as JSON; "" where a recipe lacks the key."""
    results: Rows
    """What training reached, and each task's median over seeds with the smallest and largest value."""
    heldout: list[dict[int, float]]
    """Held-out loss by step, in nats."""


def find_runs(names: list[str], runs: Path) -> list[Path]:
    """The run directories of these names, or at these paths.

    Raises:
        ValueError: fewer than two, or one is not there.
    """
    if len(names) < 2:
        raise ValueError(f"compare needs two runs or more, and was given {len(names)}; name them: compare RUN RUN")
    found = []
    for name in names:
        places = [place for place in (runs / name, Path(name)) if (place / "recipe.json").is_file()]
        if not places:
            there = ", ".join(sorted(path.parent.name for path in runs.glob("*/recipe.json"))) or "none yet"
            raise ValueError(f"there is no run {name} in {runs}; runs there: {there}")
        found.append(places[0])
    return found


def compare(run_dirs: list[Path]) -> Comparison:
    """Compare runs by the files of their directories; what a run has not reached yet is left empty.

    Raises:
        ValueError: one of the files is damaged.
    """
    resolved = [_read_recipe(run_dir / "recipe.json") for run_dir in run_dirs]
    recipes = [flatten(recipe) for recipe in resolved]
    results = [_results(run_dir, recipe["eval"]) for run_dir, recipe in zip(run_dirs, resolved, strict=True)]
    return Comparison(
        names=[run_dir.resolve().name for run_dir in run_dirs],
        recipe={
            key: [json.dumps(recipe[key]) if key in recipe else "" for recipe in recipes]
            for key in _keys(recipes)
            if key != "name" and any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)
        },
        results={key: [result.get(key, "") for result in results] for key in _keys(results)},
        heldout=[_heldout(run_dir / "metrics.jsonl") for run_dir in run_dirs],
    )


def show_comparison(names: list[str], runs: Path) -> None:
    """Print the comparison as a table, and draw `compare-A-B.png` in the current folder.

    Raises:
        ValueError: a run is not there.
    """
    from rich.console import Console
    from rich.table import Column, Table

    comparison = compare(find_runs(names, runs))
    table = Table("", *(Column(plain(name)) for name in comparison.names), header_style="bold")
    for title, rows in (("recipe", comparison.recipe), ("results", comparison.results)):
        table.add_row(f"[bold]{title}[/bold]" if rows else f"[bold]{title}: no difference[/bold]")
        for key, cells in rows.items():
            table.add_row(*map(plain, (key, *cells)))
        table.add_section()
    console = Console()
    console.print(table)
    if any(comparison.heldout):
        picture = Path(f"compare-{'-'.join(comparison.names)}.png")
        draw(comparison, picture)
        print(f"picture   {shown(str(picture))}")


def draw(comparison: Comparison, path: Path) -> None:
    """Held-out loss by step of each run, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in zip(comparison.names, comparison.heldout, strict=True):
        if points:
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def _read_recipe(path: Path) -> dict[str, Any]:
    recipe = read_json_object(path)
    asked = recipe.get("eval")
    if not isinstance(asked, dict) or not all(isinstance(asked.get(key), list) for key in ("tasks", "seeds")):
        raise ValueError(f"{path} is not a resolved recipe: it lacks eval.tasks and eval.seeds; restore it from a copy")
    return recipe


def _results(run_dir: Path, asked: dict[str, Any]) -> dict[str, str]:
    summary = read_summary(run_dir)
    cells = {key: _cell(summary[key]) for key in _SUMMED_UP if summary.get(key) is not None}
    trials: dict[str, list[float]] = {}
    for row in newest_rows(read_rows(run_dir / "eval" / "results.jsonl"), asked["tasks"], asked["seeds"]):
        if row["status"] == "ok":
            trials.setdefault(f"{row['task']} {row['metric']}, {row['init']}", []).append(row["value"])
    for key, values in sorted(trials.items()):
        cells[key] = f"{statistics.median(values):.4g} [{min(values):.4g} to {max(values):.4g}]"
    return cells


def _heldout(path: Path) -> dict[int, float]:
    points: dict[int, float] = {}
    for row in read_rows(path):
        if "heldout_loss" in row:
            points.setdefault(row["step"], row["heldout_loss"])  # a restart repeats steps
    return dict(sorted(points.items()))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _keys(parts: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))
