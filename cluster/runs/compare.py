"""Compare runs: differences between their recipes, and their results side by side."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.console import plain
from cluster.runs.summary import read_summary
from common.files import read_json_object, replacing
from common.json_lines import Row, read_rows
from common.redaction import shown
from eval.health import HEALTH
from eval.losses import LANGUAGE_MODEL_LOSSES, LOSS, PARTS, REFERENCES, by_step, heldout
from eval.statistics.choose import Choice, asked_rows, choose
from eval.statistics.difference import Difference, holm
from eval.statistics.words import amount, sentence, spread
from eval.verdict import can_be_judged, difference
from pretrain.run.changes import flatten

_SUMMARY = (
    *("status", "steps", "tokens", "train_loss", *PARTS, *(heldout(name) for name in (LOSS, *PARTS)), *REFERENCES),
    *(*HEALTH, "tokens_per_s", "mfu"),
)
_METHOD = (
    "Differences of the mean over the seeds, with 95 % intervals by a paired bootstrap of the test examples and the "
    "spread over the seeds; a run is called better where p is at most 0.05 after Holm's correction for all sentences."
)
Rows = dict[str, list[str]]
Choices = dict[tuple[str, str], Choice]
"""By task and initial weights."""


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
    heldout: list[dict[int, float]]
    """Held-out mlm_loss or clm_loss by step, in nats: the sum also depends on which other objective a run has."""


def find_runs(names: list[str], runs: Path) -> list[Path]:
    """The run directories with these names or paths.

    Raises:
        ValueError: fewer than two are given, or one does not exist.
    """
    if len(names) < 2:
        raise ValueError(f"compare needs at least two runs, got {len(names)}; use: multihop compare RUN RUN")
    found = []
    for name in names:
        places = [place for place in (runs / name, Path(name)) if (place / "recipe.json").is_file()]
        if not places:
            there = ", ".join(sorted(path.parent.name for path in runs.glob("*/recipe.json"))) or "none"
            raise ValueError(f"no run {name} in {runs}; existing runs: {there}")
        found.append(places[0])
    return found


def compare(run_dirs: list[Path]) -> Comparison:
    """Compare runs by the files of their directories; results that a run does not have yet are empty.

    Raises:
        ValueError: one of the files is damaged.
    """
    resolved = [_read_recipe(run_dir / "recipe.json") for run_dir in run_dirs]
    recipes = [flatten(recipe) for recipe in resolved]
    names = [run_dir.resolve().name for run_dir in run_dirs]
    chosen = [_chosen(run_dir, recipe["eval"]) for run_dir, recipe in zip(run_dirs, resolved, strict=True)]
    results = [_results(run_dir, choices) for run_dir, choices in zip(run_dirs, chosen, strict=True)]
    return Comparison(
        names=names,
        recipe={
            key: [json.dumps(recipe[key]) if key in recipe else "" for recipe in recipes]
            for key in _keys(recipes)
            if key != "name" and any(recipe.get(key) != recipes[0].get(key) for recipe in recipes)
        },
        results={key: [result.get(key, "") for result in results] for key in _keys(results)},
        differences=_differences(names, run_dirs, chosen),
        heldout=[_language_model_loss(run_dir / "metrics.jsonl") for run_dir in run_dirs],
    )


def show_comparison(names: list[str], runs: Path) -> None:
    """Print the comparison as a table and write `compare-A-B.png` to the current directory.

    Raises:
        ValueError: a run does not exist.
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
    for line in comparison.differences:
        console.print(plain(line))
    if comparison.differences:
        console.print(_METHOD)
    if any(comparison.heldout):
        picture = Path(f"compare-{'-'.join(comparison.names)}.png")
        draw(comparison, picture)
        print(f"wrote {shown(str(picture))}")


def draw(comparison: Comparison, path: Path) -> None:
    """Plot the held-out language-model loss of each run by step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, points in zip(comparison.names, comparison.heldout, strict=True):
        if points:
            axes.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out mlm_loss or clm_loss (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)


def _read_recipe(path: Path) -> dict[str, Any]:
    recipe = read_json_object(path)
    asked = recipe.get("eval")
    if not isinstance(asked, dict) or not all(isinstance(asked.get(key), list) for key in ("tasks", "seeds")):
        raise ValueError(
            f"{path} is not a resolved recipe: eval.tasks or eval.seeds is missing; restore it from a backup"
        )
    return recipe


def _chosen(run_dir: Path, asked: dict[str, Any]) -> Choices:
    """Of the newest checkpoint that has trials."""
    found = choose(asked_rows(read_rows(run_dir / "eval" / "results.jsonl"), asked))
    by_step = sorted(found.items(), key=lambda item: item[0].checkpoint_step or 0)
    return {(start.task, start.init): choice for start, choice in by_step if choice.chosen.rows}


def _results(run_dir: Path, choices: Choices) -> dict[str, str]:
    summary = read_summary(run_dir)
    cells = {key: _cell(summary[key]) for key in _SUMMARY if summary.get(key) is not None}
    for (task, init), choice in sorted(choices.items()):
        cells[f"{task} {choice.chosen.rows[0]['metric']}, {init}"] = spread(choice.chosen.values)
    return cells


@dataclass(frozen=True)
class _Pair:
    """A task of the first run and of another one."""

    names: tuple[str, str]
    row: Row
    """A trial of the first run, to read from what all trials of the task share."""
    found: Difference | None
    why_not: str
    """Why no verdict can be given; empty if one can."""


def _differences(names: list[str], run_dirs: list[Path], chosen: list[Choices]) -> list[str]:
    """Each run against the first, on the tasks that both have from pretrained weights."""
    pairs = [
        _pair((names[0], names[other]), (run_dirs[0], ours), (run_dirs[other], chosen[other][task, init]))
        for other in range(1, len(names))
        for (task, init), ours in chosen[0].items()
        if init == "pretrained" and (task, init) in chosen[other]
    ]
    p_values = iter(holm([pair.found.p for pair in pairs if pair.found and not pair.why_not]))
    return [_sentence(pair, 1.0 if pair.why_not else next(p_values)) for pair in pairs]


def _pair(names: tuple[str, str], first: tuple[Path, Choice], second: tuple[Path, Choice]) -> _Pair:
    row, other = first[1].chosen.rows[0], second[1].chosen.rows[0]
    if why_not := _incomparable(row, other):
        return _Pair(names, row, None, why_not)
    found = difference(row["metric"], first, second)
    if not can_be_judged(row["kind"], found):
        zero_shot = row["kind"] == "zero-shot"
        why_not = "a run has no files of predictions" if zero_shot else "a run has fewer than two seeds"
    return _Pair(names, row, found, why_not)


def _incomparable(one: Row, other: Row) -> str:
    """Why two scores of a task are not of the same thing; empty if they are."""
    if one["metric"] != other["metric"]:
        return f"the metrics are {one['metric']} and {other['metric']}"
    if one["metric"] == "perplexity" and one["other_metrics"].get("tokens") != other["other_metrics"].get("tokens"):
        return "the runs' tokenizers cut the text into different tokens"
    counts = [(row.get("reported_on"), (row.get("examples") or {}).get("test")) for row in (one, other)]
    return "" if counts[0] == counts[1] else "the scores are of different examples"


def _sentence(pair: _Pair, p: float) -> str:
    against, found, row = f"{pair.names[1]} against {pair.names[0]}: ", pair.found, pair.row
    if found is not None and not pair.why_not:
        return against + sentence(pair.names, row["task"], row["metric"], row["higher_is_better"], found, p)
    numbers = f" (difference {amount(found, row['metric'])})" if found else ""
    return f"{against}{row['task']} is not judged{numbers}: {pair.why_not}"


def _language_model_loss(path: Path) -> dict[int, float]:
    rows = read_rows(path)
    return next(filter(None, (by_step(rows, heldout(name)) for name in LANGUAGE_MODEL_LOSSES)), {})


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _keys(parts: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for part in parts for key in part))
