"""The commands `run`, `prep`, `train`, `eval`, `experiment`, `compare`, `report` and `ui`.

They import what they need, so that `--help` is fast and a mistake in a recipe is reported before torch is imported.
"""

from pathlib import Path
from typing import Annotated

import typer

from multihop.cluster.cli.failures import exit_with
from multihop.cluster.cli.options import Address, Allow, Out, Overrides, RecipePath, Runs, RunsOrStore, Verify
from multihop.common.errors import UserError
from multihop.common.redaction import safe_text

run_commands = typer.Typer()
_NAMED = 3
"""Most runs, besides the first, that the title of a report names."""


@run_commands.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsOrStore = "runs",
    address: Address = None,
    allow_change: Allow = None,
    verify: Verify = False,
) -> None:
    """Run all stages: prep, train, eval and the report. Finished work is skipped."""
    _run(recipe, overrides, runs, address, allow_change, verify, ("prep", "train", "eval"))


@run_commands.command()
def prep(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsOrStore = "runs",
    address: Address = None,
    allow_change: Allow = None,
    verify: Verify = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate work, disk space and memory.")] = False,
) -> None:
    """Prepare the data: text to token shards."""
    if dry_run:
        from multihop.cluster.cli.data import show_forecast
        from multihop.cluster.remote.remote_run import local_runs_dir
        from multihop.cluster.runs.recipe import load_recipe

        show_forecast(load_recipe(recipe, overrides or []), local_runs_dir(runs))
        return
    _run(recipe, overrides, runs, address, allow_change, verify, ("prep",))


@run_commands.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsOrStore = "runs",
    address: Address = None,
    allow_change: Allow = None,
    verify: Verify = False,
) -> None:
    """Prepare the data if needed, and pretrain. Resumes from the newest good checkpoint."""
    _run(recipe, overrides, runs, address, allow_change, verify, ("prep", "train"))


@run_commands.command("eval")
def evaluate(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsOrStore = "runs",
    address: Address = None,
    allow_change: Allow = None,
    verify: Verify = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Evaluate each new checkpoint of a run that another process trains."),
    ] = False,
) -> None:
    """Evaluate a model on the recipe's tasks, and write the report. Skips trials that have their result."""
    _run(recipe, overrides, runs, address, allow_change, verify, ("eval",), follow)


@run_commands.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Run names or directories.")],
    runs: Runs = Path("runs"),
    tracking: Annotated[
        str | None,
        typer.Option(metavar="URI", envvar="MLFLOW_TRACKING_URI", help="MLflow, for runs that are not in --runs."),
    ] = None,
) -> None:
    """Compare the recipes and results of runs."""
    from multihop.cluster.runs.compare import show_comparison

    show_comparison(names, runs, tracking)


@run_commands.command()
def report(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Run names or directories.")],
    runs: Runs = Path("runs"),
    out: Out = Path("report"),
    x: Annotated[
        str | None, typer.Option("--x", metavar="KEY", help="Recipe key: plot the final losses against it.")
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Recipe key that distinguishes the lines of the plot. Repeatable."),
    ] = None,
) -> None:
    """Write a report that compares several runs with the first. Writes report.md, report.html and pictures."""
    from multihop.cluster.runs.compare import find_runs
    from multihop.cluster.runs.recipe import check_keys
    from multihop.eval.report.comparison import write_comparison

    check_keys(series or (), "--series")
    if series and x is None:
        raise UserError("--series needs --x, whose plot it splits into lines; add --x KEY, or omit --series")

    run_dirs = find_runs(names, runs)
    first, *others = (run_dir.resolve().name for run_dir in run_dirs)
    title = f"{first} and {', '.join(others) if len(others) <= _NAMED else f'{len(others)} other runs'}"
    write_comparison(run_dirs, out, title, x=x, series=series or ())
    print(f"wrote {safe_text(str(out / 'report.html'))} and report.md beside it")


@run_commands.command()
def experiment(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Experiment, for example recipes/experiments/phases.yaml.")
    ],
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the report. Default: the experiment's name in runs."),
    ] = None,
) -> None:
    """Run all runs of an experiment, and write a report over them. Finished work is skipped."""
    from multihop.cluster.runs.experiment import read_experiment

    plan = read_experiment(file, overrides or [])

    def work() -> int:
        from multihop.cluster.runs.run_experiment import run_experiment

        return run_experiment(plan, runs, out)

    exit_with(work)


@run_commands.command()
def ui(
    runs: Runs = Path("runs"), port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000
) -> None:
    """Serve the MLflow UI for the local store."""
    from multihop.cluster.tracking.ui import serve

    serve(runs, port)


def _run(
    recipe: Path,
    overrides: list[str] | None,
    runs: str,
    address: str | None,
    allowed: list[str] | None,
    verify: bool,
    wanted: tuple[str, ...],
    following: bool = False,
) -> None:
    from multihop.cluster.runs.recipe import check_keys, load_recipe

    check_keys(allowed or (), "--allow-change")
    all_overrides = [*(overrides or []), *([f"cluster.address={address}"] if address else [])]
    loaded = load_recipe(recipe, all_overrides)

    def work() -> int:
        # These import torch: errors in the recipe are reported first.
        from multihop.cluster.remote.remote_run import local_runs_dir, open_remote_run, with_remote_checkpoints
        from multihop.cluster.runs.evaluate_during_training import evaluate_during_training
        from multihop.cluster.runs.stages import run_stages

        resolved = with_remote_checkpoints(loaded, runs)
        with open_remote_run(runs, resolved.name) as remote:
            if not following:
                return run_stages(resolved, local_runs_dir(runs), wanted, allowed or (), verify, remote)
            if remote is not None:
                raise UserError(
                    f"--follow needs a directory of runs, got {runs}; run `multihop eval` after the training"
                )
            return evaluate_during_training(resolved, Path(runs), allowed or (), verify)

    exit_with(work)
