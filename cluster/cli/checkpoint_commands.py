"""The commands `multihop checkpoints …`. They import what they need, so that `--help` is fast."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from multihop.cluster.cli.locate_run import locate_run
from multihop.cluster.cli.options import AsJson, CheckpointsPlace, Runs, Step

checkpoints_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@checkpoints_app.command("list")
def list_checkpoints(run: CheckpointsPlace, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """List checkpoints: step, date, ranks, size, state."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.checkpoints import show_list

    show_list(place, as_json)


@checkpoints_app.command("verify")
def verify_checkpoints(run: CheckpointsPlace, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """Hash every file of every checkpoint. Exit code 1: a file is damaged."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.checkpoints import show_results

    raise typer.Exit(show_results(place, as_json))


@checkpoints_app.command("average")
def average_checkpoints(
    run: CheckpointsPlace,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory, absent or empty.")],
    last: Annotated[int, typer.Option(min=2, help="Number of the newest checkpoints.")] = 5,
    runs: Runs = Path("runs"),
) -> None:
    """Average the weights of the newest checkpoints. The result has no optimizer state."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.export import show_average

    show_average(place, last, out)


@checkpoints_app.command("export")
def export_checkpoint(
    run: CheckpointsPlace,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output directory, absent or empty.")],
    to: Annotated[Literal["hf"], typer.Option(help="Format: hf (Hugging Face).")] = "hf",
    step: Step = None,
    runs: Runs = Path("runs"),
) -> None:
    """Export a checkpoint and its tokenizer to Hugging Face's format. The Auto classes of transformers load it."""
    place = locate_run(run, runs)
    from multihop.cluster.cli.export import show_export

    show_export(place, out, step)


@checkpoints_app.command("import")
def import_checkpoint(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Hugging Face model directory with config.json and model.safetensors."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory, absent or empty.")],
) -> None:
    """Import a Hugging Face model as a checkpoint for model.init_from."""
    from multihop.cluster.cli.export import show_import

    show_import(folder, out)
