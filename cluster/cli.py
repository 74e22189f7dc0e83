"""The command line. Only what `--help` needs is imported here."""

import errno
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from data_prep.files import DISK_FULL
from data_prep.reading.failures import ReadFailed
from data_prep.shown import shown

app = typer.Typer(
    help="Pretrain language models on your own text, and see which run is better.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
inspect_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(inspect_app, name="inspect", help="Look into what a run does.")
checkpoints_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(checkpoints_app, name="checkpoints", help="What a run has saved.")

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data", help="What was prepared.")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, for instance recipes/demo.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE…", help="Override the recipe: model.layers=3 name=other")
]
Runs = Annotated[Path, typer.Option(help="The folder that holds the runs.")]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow-change", metavar="KEY", help="Let this key change under a run that has begun."),
]
Address = Annotated[str | None, typer.Option(help="A Ray cluster, HOST:PORT; without one Ray is started here.")]

CheckpointsPlace = Annotated[
    str, typer.Argument(metavar="DIR", help="A run's folder, its checkpoints' folder, or s3://BUCKET/PREFIX.")
]
DataPlace = Annotated[Path, typer.Argument(metavar="DIR", help="A prepared data set, or a run's folder.")]
_ADVICE = {errno.EACCES: "ask its owner to let you read or write it", **dict.fromkeys(DISK_FULL, "make room")}
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    address: Address = None,
    allow_change: Allow = None,
) -> None:
    """All stages; what is done already is not done again."""
    _run(recipe, overrides, runs, address, allow_change, "eval")


@app.command()
def prep(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    address: Address = None,
    allow_change: Allow = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done, and how large.")] = False,
) -> None:
    """Text to token shards."""
    if dry_run:
        from cluster.data_sets import show_forecast
        from cluster.recipe import load_recipe

        show_forecast(load_recipe(recipe, overrides or []), runs)
        return
    _run(recipe, overrides, runs, address, allow_change, "prep")


@app.command()
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    address: Address = None,
    allow_change: Allow = None,
) -> None:
    """Preparation if needed, and pretraining: goes on from the last good checkpoint."""
    _run(recipe, overrides, runs, address, allow_change, "train")


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN…", help="Names of runs.")], runs: Runs = Path("runs")
) -> None:
    """What differed in the recipes beside what differed in the results."""
    from cluster.compare import show_comparison

    show_comparison(names, runs)


@inspect_app.command("batch")
def inspect_batch(
    recipe: RecipePath,
    step: Annotated[int, typer.Option(help="Counted from 0: the step that is taken when so many are done.")],
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    world_size: Annotated[int | None, typer.Option(min=1, help="Tell which rank of so many takes a sample.")] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's samples.")] = None,
    as_json: AsJson = False,
) -> None:
    """Which samples a step uses, from which documents, decoded."""
    import json

    from cluster.inspect_batch import deviations, inspect_step, show_step
    from cluster.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    found = inspect_step(resolved, runs, step, world_size, rank)
    if others := deviations(resolved, runs):
        print(
            f"multihop: {runs / resolved.name} has other batches, for it differs in {', '.join(others)}",
            file=sys.stderr,
        )
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False, indent=1))
    else:
        show_step(found)


@data_app.command("verify")
def verify_data(place: DataPlace) -> None:
    """Read and hash every byte of a data set. Exit code 1: something is damaged."""
    from cluster.data_sets import show_verdict

    raise typer.Exit(show_verdict(place))


@data_app.command("stats")
def data_stats(
    place: DataPlace,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes.")] = Path("data-stats.png"),
    as_json: AsJson = False,
) -> None:
    """Lengths, sources, what was dropped, and how often the pieces occur."""
    from cluster.data_sets import show_stats

    show_stats(place, picture, as_json)


@app.command()
def ui(
    runs: Runs = Path("runs"), port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 5000
) -> None:
    """MLflow over the local store, in the browser."""
    from cluster.ui import serve

    serve(runs, port)


@checkpoints_app.command("list")
def list_checkpoints(place: CheckpointsPlace, as_json: AsJson = False) -> None:
    """Step, date, ranks, size and whether it is committed, of each checkpoint."""
    from cluster.checkpoints import show_list

    show_list(place, as_json)


@checkpoints_app.command("verify")
def verify_checkpoints(place: CheckpointsPlace, as_json: AsJson = False) -> None:
    """Read and hash every byte of every checkpoint. Exit code 1: something is damaged."""
    from cluster.checkpoints import show_verdicts

    raise typer.Exit(show_verdicts(place, as_json))


@checkpoints_app.command("export")
def export_checkpoint(
    place: CheckpointsPlace,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Made by this; it may be there if it is empty.")],
    to: Annotated[Literal["hf"], typer.Option(help="hf: Hugging Face's layout.")] = "hf",
    step: Annotated[int | None, typer.Option(min=0, help="Without it the newest good checkpoint.")] = None,
) -> None:
    """Write a checkpoint's weights and tokenizer for transformers' Auto classes."""
    from cluster.huggingface import show_export

    show_export(place, out, step)


@checkpoints_app.command("import")
def import_checkpoint(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="With config.json and model.safetensors.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="For model.init_from; it may be there if it is empty.")],
) -> None:
    """Make a checkpoint that model.init_from takes of a Hugging Face folder."""
    from cluster.huggingface import show_import

    show_import(folder, out)


def _run(
    recipe: Path,
    overrides: list[str] | None,
    runs: Path,
    address: str | None,
    allowed: list[str] | None,
    last: str,
) -> None:
    from cluster.prep import WorkersDied
    from cluster.recipe import load_recipe
    from cluster.stages import run_stages
    from cluster.train import TrainingFailed

    given = [*(overrides or []), *([f"cluster.address={address}"] if address else [])]
    try:
        code = run_stages(load_recipe(recipe, given), runs, last, allowed or ())
    except KeyboardInterrupt:
        print("\nmultihop: stopped; the same command goes on from here", file=sys.stderr)
        code = 75
    except (TrainingFailed, WorkersDied) as error:
        print(f"multihop: {shown(str(error))}", file=sys.stderr)
        code = 1
    raise typer.Exit(code)


def main() -> None:
    """The command `multihop`. 0: done; 2: a mistake of the user's; 75: stopped by a signal, goes on; 1: all else."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except ValueError as error:
        print(f"multihop: {shown(str(error))}", file=sys.stderr)
        sys.exit(2)
    except ReadFailed as error:
        print(f"multihop: {shown(str(error))}; the same command goes on from here", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in _ADVICE:
            raise
        advice = _ADVICE[error.errno]
        print(f"multihop: {shown(str(error))}; {advice}, and give the same command again", file=sys.stderr)
        sys.exit(1)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
