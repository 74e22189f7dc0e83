"""The command `multihop`. Its commands import what they need, so that `--help` is fast."""

import logging
from typing import Annotated

import typer

from multihop.cluster.cli.babi import babi_command
from multihop.cluster.cli.checkpoints import checkpoints_app
from multihop.cluster.cli.data import data_app
from multihop.cluster.cli.doctor import doctor_command
from multihop.cluster.cli.failures import friendly_errors
from multihop.cluster.cli.inference import inference_commands
from multihop.cluster.cli.init import init
from multihop.cluster.cli.inspect import inspect_app
from multihop.cluster.cli.jobs import job_commands
from multihop.cluster.cli.plan import plan_command
from multihop.cluster.cli.recipes import recipes_app
from multihop.cluster.cli.runs import run_commands
from multihop.cluster.interrupts import interrupt_on_signals

app = typer.Typer(
    help="Pretrain language models on your own text, evaluate them, and compare runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for commands in (run_commands, job_commands, plan_command, doctor_command, inference_commands, babi_command):
    app.add_typer(commands)
app.add_typer(inspect_app, name="inspect", help="Show what a run trains on.")
app.add_typer(checkpoints_app, name="checkpoints", help="List, verify, audit, average, export and import checkpoints.")
app.add_typer(data_app, name="data", help="Verify and describe prepared data.")
app.add_typer(recipes_app, name="recipes")
app.command()(init)


def _show_version(is_requested: bool) -> None:
    if is_requested:
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


def main() -> None:
    """Run the command `multihop`, which exits with one of the codes in multihop.common.errors."""
    interrupt_on_signals()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns if the home directory is not writable
    with friendly_errors():
        app()


if __name__ == "__main__":
    main()
