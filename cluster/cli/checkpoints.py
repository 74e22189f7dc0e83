"""The commands `multihop checkpoints …`. They import what they need, so that `--help` is fast."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from multihop.cluster.cli.failures import exit_with
from multihop.cluster.cli.options import AsJson, CheckpointsPath, Runs, Step, locate_run
from multihop.common.errors import UserError
from multihop.common.redaction import safe_text

if TYPE_CHECKING:
    from multihop.cluster.runs.audit_rounding import Rounding

checkpoints_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@checkpoints_app.command("list")
def list_command(run: CheckpointsPath, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """List checkpoints: step, date, ranks, size, state."""
    location = locate_run(run, runs)
    show_list(location, as_json)


@checkpoints_app.command("verify")
def verify_command(run: CheckpointsPath, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """Hash every file of every checkpoint. Exit code 1: a file is damaged."""
    location = locate_run(run, runs)
    raise typer.Exit(show_results(location, as_json))


@checkpoints_app.command("audit")
def audit_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run name, run directory, or s3://BUCKET/PREFIX/NAME of a run.")
    ],
    first: Annotated[
        int | None,
        typer.Option("--from", min=0, help="Step to train again from; 0: the start. Default: the one before --to."),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--to", min=1, help="Step of the checkpoint to audit. Default: the newest.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ray cluster to train on. Default: this machine.")
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find the first step that differs: checksums of each step, two replays.")
    ] = False,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Verify a checkpoint by replaying its steps. Exit code 1: bits differ, unless conditions have changed and the
    differences are within rounding."""
    location = locate_run(run, runs)
    if "://" not in location and not (Path(location) / "recipe.json").is_file():
        raise UserError(f"{location} is not a run, because it has no recipe.json; give a run's name or directory")
    if "://" in location and address is not None:
        raise UserError(f"--address={address}: a run in an object store is audited on this machine; remove it")
    exit_with(lambda: show_audit(location, first, last, address, bisect, as_json), rerun_to="start over")


@checkpoints_app.command("average")
def average_command(
    run: CheckpointsPath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory, absent or empty.")],
    last: Annotated[int, typer.Option(min=2, help="Number of the newest checkpoints.")] = 5,
    runs: Runs = Path("runs"),
) -> None:
    """Average the weights of the newest checkpoints. The result has no optimizer state."""
    location = locate_run(run, runs)
    show_average(location, last, out)


@checkpoints_app.command("export")
def export_command(
    run: CheckpointsPath,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory, absent or empty.")],
    to: Annotated[Literal["hf"], typer.Option(help="Format: hf (Hugging Face).")] = "hf",
    step: Step = None,
    runs: Runs = Path("runs"),
) -> None:
    """Export a checkpoint and its tokenizer to Hugging Face's format. The Auto classes of transformers load it."""
    location = locate_run(run, runs)
    show_export(location, out, step)


@checkpoints_app.command("import")
def import_command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Hugging Face model directory with config.json and model.safetensors, or ELMo's options.json and "
            "weights in HDF5.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output directory, absent or empty.")],
) -> None:
    """Import a Hugging Face model, or an ELMo, as a checkpoint."""
    show_import(folder, out)


def show_list(location: str, as_json: bool) -> None:
    """Print the checkpoints at `location`."""
    from rich.console import Console
    from rich.table import Column, Table

    from multihop.cluster.console import plain
    from multihop.cluster.runs.audit import audited_checkpoints
    from multihop.cluster.runs.checkpoints import list_checkpoints
    from multihop.pretrain.run.find_checkpoint import checkpoints_at

    rows = list_checkpoints(checkpoints_at(location), audited_checkpoints(location))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    titles = ("step", "date", "ranks", "stage", "parameters", "size", "tokens", "state")
    table = Table(*(Column(title, overflow="fold") for title in titles), box=None)
    for row in rows:
        cells = (row.ranks, row.zero_stage, row.parameters, row.bytes, row.tokens)
        numbers = ["" if cell is None else f"{cell:,}" for cell in cells]
        numbers[3] = "" if row.bytes is None else _size(row.bytes)
        name = row.folder if row.step is None else f"{row.step:,}"
        date, state = (row.date or "").replace("T", " "), row.note or "committed"
        state += f", {row.audit}" if row.audit else ""
        table.add_row(*map(plain, (name, date, *numbers, state)))
    # Where there is no terminal, Rich would break lines at 80 columns.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def show_results(location: str, as_json: bool) -> int:
    """Verify the checkpoints at `location` and print the results; returns the exit code, 1 if something is damaged."""
    from multihop.cluster.runs.checkpoints import verify_checkpoints
    from multihop.pretrain.run.find_checkpoint import checkpoints_at

    checkpoints = checkpoints_at(location)
    results = verify_checkpoints(checkpoints)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        for result in results:
            for sentence in result.damages or [result.note or "good"]:
                print(safe_text(f"{result.folder}  {sentence}"))
    if all(result.good for result in results):
        return 0
    if not as_json:
        print(
            "Restore the named files from a copy, or rerun the training command: it resumes from the newest good "
            "checkpoint, and renames newer ones that are damaged."
        )
    return 1


def show_audit(
    location: str, first: int | None, last: int | None, address: str | None, bisect: bool, as_json: bool
) -> int:
    """Audit, and print the outcome; returns the exit code, 0 if all is equal, or within rounding where other bits are
    expected."""
    from multihop.cluster.runs.audit import audit, state_of
    from multihop.cluster.runs.audit_in_store import audit_in_store

    started = time.monotonic()
    if "://" in location:
        outcome = audit_in_store(location, first, last, bisect)
    else:
        outcome = audit(Path(location), first, last, address, bisect)
    if as_json:
        print(json.dumps(asdict(outcome), indent=1))
        return 0 if outcome.is_proven else 1
    print(f"replayed  steps {outcome.first + 1:,} to {outcome.last:,} in {time.monotonic() - started:,.0f} s")
    if outcome.is_equal:
        print("equal     all weights, moments and counters, bit for bit")
        if sentence := state_of(outcome):
            print(f"state     {sentence}")
        return 0
    for sentence in outcome.counters:
        print(f"differs   {sentence}")
    if outcome.tensors:
        each = outcome.tensors[0]
        print(
            f"differs   {each.kind} of {each.parameter}: {each.elements:,} of {each.size:,} elements, by "
            + ("no finite number" if each.relative is None else f"{each.relative:.1e} of their norm")
            + f"; tensors that differ: {len(outcome.tensors):,}"
        )
    if outcome.loss is not None:
        step, found, expected = outcome.loss
        print(f"loss      first logged step that differs: {step:,}, {found!r} in the replay, {expected!r} in the run")
    if sentence := state_of(outcome):
        print(f"state     {sentence}")
    elif bisect and outcome.states.steps == 0:
        print("state     the run recorded none; set engine.replica_check_interval in its recipe")
    if outcome.replays is not None:
        apart = outcome.replays.first_different
        print(
            "replays   both agree in every step; the saved checkpoint differs from them"
            if apart is None
            else f"replays   they differ from step {apart:,} on: the replay is not deterministic on these devices"
        )
    for sentence in outcome.conditions:
        print(safe_text(f"changed   {sentence}: bitwise differences are expected"))
    if outcome.rounding is not None:
        print(_rounding_line(outcome.rounding))
    return 0 if outcome.is_proven else 1


def _rounding_line(found: "Rounding") -> str:
    if found.is_within is None:
        return f"verdict   none: {found.reason}"
    number = "no finite number" if found.relative is None else f"{found.relative:.1e}"
    largest = f"{number}, in {found.kind} of {found.parameter}"
    if found.is_within:
        return f"within    rounding: the largest difference of an element is {largest}; bound {found.bound:.1e}"
    if found.relative is not None and found.bound is not None and found.relative <= found.bound:
        return "beyond    rounding: counters differ, and rounding changes none"
    return f"beyond    rounding: an element differs by {largest}; bound {found.bound:.1e}"


def show_average(location: str, last: int, out: Path) -> None:
    """Average, and print what was written."""
    from multihop.cluster.runs.checkpoints import average_checkpoints

    made = average_checkpoints(location, last, out)
    print(f"{safe_text(made)} has the mean of the weights of the {last} newest checkpoints of {safe_text(location)}")


def show_export(location: str, out: Path, step: int | None) -> None:
    """Export, and print what was written and how to open it."""
    from multihop.cluster.runs.checkpoints import export_checkpoint
    from multihop.pretrain.models.families import FAMILIES

    exported = export_checkpoint(location, out, step)
    for reason in exported.skipped:
        print(f"skipped: {safe_text(reason)}")
    print(f"{exported.checkpoint} was exported to {out}:")
    for path in sorted(out.iterdir()):
        print(f"  {path.name:24}{path.stat().st_size:>15,} bytes")
    auto_class = FAMILIES[exported.model.family].auto_class
    print(f"\nfrom transformers import {auto_class}, AutoTokenizer")
    print(f'model = {auto_class}.from_pretrained("{out}")')
    print(f'tokenizer = AutoTokenizer.from_pretrained("{out}")')


def show_import(source: Path, out: Path) -> None:
    """Import, and print what a recipe needs to start from it."""
    from multihop.cluster.runs.checkpoints import import_checkpoint
    from multihop.data_prep.tokenizers.existing import find_huggingface_tokenizer
    from multihop.pretrain.models.families import FAMILIES

    imported = import_checkpoint(source, out)
    if imported.model.untrainable is not None:
        print(f"{source} was imported to {imported.checkpoint}: its weights can be read but not trained further.")
        return
    print(f"{source} was imported to {imported.checkpoint}. To start from it, write in the recipe:")
    print("\nmodel:")
    for key, value in imported.model.model_dump(exclude={"preset", "init_from"}, exclude_none=True).items():
        print(f"  {key}: {value}")
    print(f"  init_from: {source}")
    try:
        # The ids of a translating model are in another file than its tokenizer.
        tokenizer = None if FAMILIES[imported.model.family].translates else find_huggingface_tokenizer(source)
    except UserError as error:
        print(f"\nIts tokenizer cannot be used: {error}")
    else:
        if tokenizer is not None:
            print(f"tokenizer:\n  path: {tokenizer}")
    print(f"\nThe data's tokenizer must have the same {imported.vocab_size:,} tokens and ids.")
    if imported.initialized:
        print(f"Not in {source}, initialized at random: {', '.join(imported.initialized)}")


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
