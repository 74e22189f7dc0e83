"""The command line. Only what `--help` needs is imported here."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Pretrain language models on your own text, and see which run is better.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, for instance recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Override the recipe: model.layers=3 name=other")
]
Runs = Annotated[Path, typer.Option(help="The folder that holds the runs.")]
Address = Annotated[str | None, typer.Option(help="A Ray cluster, HOST:PORT; without one Ray is started here.")]


@app.command()
def run(recipe: RecipePath, overrides: Overrides = None, runs: Runs = Path("runs"), address: Address = None) -> None:
    """All stages; what is done already is not done again."""
    _run(recipe, overrides, runs, address, "eval")


@app.command()
def prep(recipe: RecipePath, overrides: Overrides = None, runs: Runs = Path("runs"), address: Address = None) -> None:
    """Text to token shards."""
    _run(recipe, overrides, runs, address, "prep")


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, runs: Runs = Path("runs"), address: Address = None) -> None:
    """Preparation if needed, and pretraining: goes on from the last good checkpoint."""
    _run(recipe, overrides, runs, address, "train")


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Names of runs.")], runs: Runs = Path("runs")
) -> None:
    """What differed in the recipes beside what differed in the results."""
    from cluster.compare import show_comparison

    show_comparison(names, runs)


@app.command()
def ui(
    runs: Runs = Path("runs"), port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 5000
) -> None:
    """MLflow over the local store, in the browser."""
    from cluster.ui import serve

    serve(runs, port)


def _run(recipe: Path, overrides: list[str] | None, runs: Path, address: str | None, last: str) -> None:
    from cluster.recipe import load_recipe
    from cluster.stages import run_stages
    from cluster.train import TrainingFailed

    given = [*(overrides or []), *([f"cluster.address={address}"] if address else [])]
    try:
        code = run_stages(load_recipe(recipe, given), runs, last)
    except KeyboardInterrupt:
        print("\nmultihop: stopped; the same command goes on from here", file=sys.stderr)
        code = 75
    except TrainingFailed as error:
        print(f"multihop: {error}", file=sys.stderr)
        code = 1
    raise typer.Exit(code)


def main() -> None:
    """The command `multihop`. 0: done; 2: a mistake of the user's; 75: stopped by a signal, goes on; 1: all else."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except ValueError as error:
        print(f"multihop: {error}", file=sys.stderr)
        sys.exit(2)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
