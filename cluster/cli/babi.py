"""The command `babi`: end-to-end memory networks on the bAbI tasks."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

babi_command = typer.Typer()


@babi_command.command()
def babi(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="bAbI's directory tasks_1-20_v1-1/en.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Directory for results.jsonl and the report. Default: runs/babi, or runs/babi-joint."
        ),
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="N,N…", help="Numbers of the tasks. Default: all 20.")] = "",
    joint: Annotated[bool, typer.Option("--joint", help="Train one network on all of the tasks.")] = False,
    hops: Annotated[int, typer.Option(help="Number of hops, 1 to 20.")] = 3,
    layerwise: Annotated[
        bool, typer.Option("--layerwise", help="Share the embeddings among all hops, with a linear map between them.")
    ] = False,
    restarts: Annotated[
        int,
        typer.Option(
            min=1,
            help="Networks to train from different initial weights. The one with the lowest training error is tested.",
        ),
    ] = 10,
    seed: Annotated[int, typer.Option(help="Seed of initial weights, orders and noise.")] = 1,
) -> None:
    """Train memory networks on the bAbI tasks."""
    from multihop.cluster.console import progress_line
    from multihop.common.errors import UserError
    from multihop.eval.memory_network.babi import run_babi
    from multihop.eval.memory_network.training import JOINT, TrainingSettings
    from multihop.eval.report.babi_report import write_babi_report
    from multihop.eval.tasks.babi import TASKS

    parts = [part.strip() for part in tasks.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts) or (tasks and not parts):
        raise UserError(f"--tasks {tasks}: expected numbers with commas between them, such as 1,2,15")
    out = out or Path("runs/babi-joint" if joint else "runs/babi")
    base = JOINT if joint else TrainingSettings()
    settings = replace(base, hops=hops, restarts=restarts, tying="layerwise" if layerwise else "adjacent")
    with progress_line("train") as line:
        rows = run_babi(
            folder,
            out,
            [int(part) for part in parts] or list(TASKS),
            joint,
            settings,
            seed,
            lambda what, epoch, epochs: line.update(epoch, epochs, what),
        )
    write_babi_report(rows, out)
    errors = [row["error"] for row in rows]
    for row in rows:
        print(f"{row['task']:2d}  {row['name']:28s} {100 * row['error']:5.1f} %")
    print(f"mean error {100 * sum(errors) / len(errors):.1f} %; report: {out / 'report.md'}")
