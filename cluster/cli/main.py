"""The command line. Commands import what they need, so that `--help` is fast."""

import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from multihop.cluster.cli.checkpoint_commands import checkpoints_app
from multihop.cluster.cli.failures import friendly_errors
from multihop.cluster.cli.init import init
from multihop.cluster.cli.job_commands import job_commands
from multihop.cluster.cli.locate_run import locate_run
from multihop.cluster.cli.options import (
    Address,
    Allow,
    AsJson,
    DataPlace,
    ModelPlace,
    Out,
    Overrides,
    RecipePath,
    Runs,
    RunsOrStore,
    Step,
    Verify,
)
from multihop.cluster.cli.recipe_commands import recipes_app
from multihop.common.errors import UserError
from multihop.common.exit_codes import FAILED, STOPPED
from multihop.common.redaction import shown

_NAMED = 3
"""The most runs beside the first that a report is named after."""

app = typer.Typer(
    help="Pretrain language models on your own text, evaluate them, and compare runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
inspect_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(inspect_app, name="inspect", help="Show what a run trains on.")
app.add_typer(recipes_app, name="recipes")
app.add_typer(checkpoints_app, name="checkpoints", help="List, verify, average, export and import checkpoints.")
data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data", help="Verify and describe prepared data.")

app.add_typer(job_commands)
app.command()(init)


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        from importlib.metadata import version

        print(f"multihop {version('multihop')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Handle the options of `multihop` itself."""


@app.command()
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


@app.command()
def prep(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: RunsOrStore = "runs",
    address: Address = None,
    allow_change: Allow = None,
    verify: Verify = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the work, disk and memory.")] = False,
) -> None:
    """Prepare the data: text to token shards."""
    if dry_run:
        from multihop.cluster.cli.data import show_forecast
        from multihop.cluster.runs.recipe import load_recipe
        from multihop.cluster.runs.remote_run import folder_here

        show_forecast(load_recipe(recipe, overrides or []), folder_here(runs))
        return
    _run(recipe, overrides, runs, address, allow_change, verify, ("prep",))


@app.command()
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


@app.command("eval")
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


@app.command()
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


@app.command()
def report(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Run names or directories.")],
    runs: Runs = Path("runs"),
    out: Out = Path("report"),
    x: Annotated[
        str | None, typer.Option("--x", metavar="KEY", help="Recipe key: plot the final losses against it.")
    ] = None,
    series: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Recipe key that tells the lines apart. Repeatable.")
    ] = None,
) -> None:
    """Write a report that compares several runs with the first. Writes report.md, report.html and pictures."""
    from multihop.cluster.runs.compare import find_runs
    from multihop.cluster.runs.recipe import check_keys
    from multihop.eval.comparison.report import write_comparison

    check_keys(series or (), "--series")
    if series and x is None:
        raise UserError("--series needs --x, whose plot it splits into lines; add --x KEY, or omit --series")

    found = find_runs(names, runs)
    first, *others = (run_dir.resolve().name for run_dir in found)
    title = f"{first} and {', '.join(others) if len(others) <= _NAMED else f'{len(others)} other runs'}"
    write_comparison(found, out, title, x=x, series=series or ())
    print(f"wrote {shown(str(out / 'report.html'))} and report.md beside it")


@app.command()
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
    """Do all runs of an experiment, and report on them. Finished work is skipped."""
    from multihop.cluster.runs.experiment import read_experiment

    plan = read_experiment(file, overrides or [])

    def work() -> int:
        from multihop.cluster.runs.run_experiment import run_experiment

        return run_experiment(plan, runs, out)

    _exit_with(work)


@inspect_app.command("batch")
def inspect_batch(
    recipe: RecipePath,
    step: Annotated[int, typer.Option(help="0-based step.")],
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    world_size: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Number of ranks: show each sample's rank.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Show only this rank's samples; needs --world-size.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the samples of a training step, decoded, and their documents."""
    import json

    from multihop.cluster.runs.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    from multihop.cluster.cli.inspect_batch import deviations, inspect_step
    from multihop.cluster.cli.inspected_step import show_step

    found = inspect_step(resolved, runs, step, world_size, rank)
    if others := deviations(resolved, runs):
        print(
            f"multihop: warning: the existing run {runs / resolved.name} has different batches: its recipe differs in "
            f"{', '.join(others)}",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False, indent=1))
    else:
        show_step(found)


@data_app.command("verify")
def verify_data(place: DataPlace, runs: Runs = Path("runs")) -> None:
    """Hash every file of a data set. Exit code 1: a file is damaged."""
    from multihop.cluster.cli.data import show_verdict

    raise typer.Exit(show_verdict(place, runs))


@data_app.command("stats")
def data_stats(
    place: DataPlace,
    runs: Runs = Path("runs"),
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot lengths and token frequencies to this PNG file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show document lengths, sources and token frequencies. Also shows which documents were dropped, and why."""
    from multihop.cluster.cli.data import show_stats

    show_stats(place, runs, picture, as_json)


@app.command()
def fill(
    run: ModelPlace,
    texts: Annotated[list[str], typer.Argument(metavar="TEXT…", help='For example "The river [MASK] stone."')],
    runs: Runs = Path("runs"),
    step: Step = None,
    candidates: Annotated[int, typer.Option("--top", min=1, help="Number of tokens to show for each mask.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Fill in the mask tokens of texts with a masked model."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.inference import show_filled

    show_filled(place, step, texts, candidates, as_json)


@app.command()
def generate(
    run: ModelPlace,
    prompts: Annotated[list[str], typer.Option("--prompt", metavar="TEXT", help="Text to continue. Repeatable.")],
    runs: Runs = Path("runs"),
    step: Step = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float | None, typer.Option(help="Sample; logits are divided by this.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 1,
) -> None:
    """Continue prompts with a causal model. Greedy, unless a sampling option is given."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.inference import show_generated
    from multihop.eval.inference.sampling import Sampling

    if temperature is None and top_k is None and top_p is None:
        sampling = None
    else:
        sampling = Sampling(1.0 if temperature is None else temperature, top_k, top_p, seed)
    show_generated(place, step, prompts, max_tokens, sampling)


@app.command()
def translate(
    run: ModelPlace,
    runs: Runs = Path("runs"),
    step: Step = None,
    beams: Annotated[int, typer.Option(min=1, help="Hypotheses of the beam search; 1: greedy.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Above 0: prefers longer translations.")] = 0.6,
    maps: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Draw what each line's translation attends to, N.png a line.")
    ] = None,
) -> None:
    """Translate the lines of standard input. Needs a translation model; prints one line for each."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.inference import show_translated
    from multihop.eval.inference.beam_search import Search

    show_translated(place, step, Search(beams, length_penalty), maps)


@app.command()
def embed(
    run: ModelPlace,
    runs: Runs = Path("runs"),
    step: Step = None,
    pooling: Annotated[
        Literal["mean", "family"],
        typer.Option(help="Mean of all tokens, or what the family is fine-tuned on: pooler, first or last token."),
    ] = "mean",
) -> None:
    """Embed the lines of standard input. Prints one JSON object per line."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.inference import show_embedded

    show_embedded(place, step, pooling)


@app.command()
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
    given = [*(overrides or []), *([f"cluster.address={address}"] if address else [])]
    loaded = load_recipe(recipe, given)

    def work() -> int:
        # These import torch: errors in the recipe are reported before that.
        from multihop.cluster.runs.follow import follow
        from multihop.cluster.runs.remote_run import folder_here, open_remote_run, with_remote_checkpoints
        from multihop.cluster.runs.stages import run_stages

        placed = with_remote_checkpoints(loaded, runs)
        with open_remote_run(runs, placed.name) as home:
            if not following:
                return run_stages(placed, folder_here(runs), wanted, allowed or (), verify, home)
            if home is not None:
                raise UserError(f"--follow needs a folder of runs, not {runs}; run `multihop eval` after the training")
            return follow(placed, Path(runs), allowed or (), verify)

    _exit_with(work)


def _exit_with(work: Callable[[], int]) -> None:
    """Do the work and exit with its code."""
    from multihop.cluster.ray.failures import TrainingFailed, WorkerDiedError

    try:
        code = work()
    except KeyboardInterrupt:
        print("\nmultihop: stopped; rerun the same command to resume", file=sys.stderr)
        # Everything is closed. Exit handlers of libraries may wait for processes that the signal has ended as well.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STOPPED)
    except (TrainingFailed, WorkerDiedError) as error:
        print(f"multihop: {shown(str(error))}", file=sys.stderr)
        code = FAILED
    raise typer.Exit(code)


def main() -> None:
    """The command `multihop`; it exits with one of multihop.common.exit_codes."""
    signal.signal(signal.SIGTERM, _interrupt)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if the home directory is not writable
    with friendly_errors():
        app()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
