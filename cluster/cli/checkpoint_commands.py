"""The commands `multihop checkpoints …`. They import what they need, so that `--help` is fast."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.cli.options import AsJson, CheckpointsPlace, Step

checkpoints_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@checkpoints_app.command("list")
def list_checkpoints(place: CheckpointsPlace, as_json: AsJson = False) -> None:
    """List checkpoints: step, date, ranks, size, and whether they are committed."""
    from cluster.cli.checkpoints import show_list

    show_list(place, as_json)


@checkpoints_app.command("verify")
def verify_checkpoints(place: CheckpointsPlace, as_json: AsJson = False) -> None:
    """Hash every file of every checkpoint. Exit code 1: a file is damaged."""
    from cluster.cli.checkpoints import show_results

    raise typer.Exit(show_results(place, as_json))


@checkpoints_app.command("average")
def average_checkpoints(
    place: CheckpointsPlace,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory, absent or empty.")],
    last: Annotated[int, typer.Option(min=2, help="Number of the newest checkpoints.")] = 5,
) -> None:
    """Write the mean of the weights of the newest checkpoints, as a checkpoint."""
    from cluster.cli.export import show_average

    show_average(place, last, out)


@checkpoints_app.command("export")
def export_checkpoint(
    place: CheckpointsPlace,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Output directory, absent or empty.")],
    to: Annotated[Literal["hf"], typer.Option(help="Format: hf (Hugging Face).")] = "hf",
    step: Step = None,
) -> None:
    """Export a checkpoint and its tokenizer for the Auto classes of transformers."""
    from cluster.cli.export import show_export

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
    from cluster.cli.export import show_import

    show_import(folder, out)
