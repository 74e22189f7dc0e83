"""`multihop checkpoints`: list and verify the checkpoints of a run."""

import json
import re
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from math import prod

from rich.console import Console
from rich.table import Column, Table

from multihop.cluster.console import plain, progress_line
from multihop.common.errors import UserError
from multihop.common.redaction import shown
from multihop.common.storage import open_folder
from multihop.pretrain.checkpoint.manifest import MANIFEST, folder_of_step, read_checkpoint_manifest
from multihop.pretrain.checkpoint.verify import damages, list_steps
from multihop.pretrain.run.find_checkpoint import checkpoints_at

_SET_ASIDE = re.compile(r"step-\d+\.damaged-\w+")
NEVER_COMMITTED = "never committed: it is ignored, and the next start of its run removes the run's files in it"


@dataclass(frozen=True)
class Listed:
    """A checkpoint as its manifest describes it, or a folder without one and why."""

    folder: str
    """Its name among the checkpoints."""
    committed: bool
    note: str = ""
    step: int | None = None
    date: str | None = None
    """Of the commit, local time, ISO 8601."""
    ranks: int | None = None
    zero_stage: int | None = None
    parameters: int | None = None
    """Number of elements of all of them."""
    bytes: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class VerifyResult:
    """What reading every byte of a checkpoint showed."""

    folder: str
    good: bool
    damages: list[str]
    """A sentence each."""
    note: str = ""


def list_checkpoints(checkpoints: str) -> list[Listed]:
    """All folders of steps, oldest first, and then those that were renamed because they are damaged."""
    rows = [_listed(checkpoints, step) for step in list_steps(checkpoints)]
    aside = [name for name in open_folder(checkpoints).names() if _SET_ASIDE.fullmatch(name)]
    return rows + [
        Listed(name, False, "renamed because it is damaged; remove it when you have looked at it") for name in aside
    ]


def verify_checkpoints(checkpoints: str) -> list[VerifyResult]:
    """Read all bytes of all checkpoints, oldest first."""
    steps, results = list_steps(checkpoints), []
    with progress_line("verify   ") as line:
        for done, step in enumerate(steps):
            line.update(done, len(steps), f"step {step}")
            results.append(_verify_one(folder_of_step(checkpoints, step)))
        line.update(len(steps), len(steps))
    return results


def show_list(place: str, as_json: bool) -> None:
    """Print the checkpoints at `place`."""
    rows = list_checkpoints(checkpoints_at(place))
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
        date, state = (row.date or "").replace("T", " "), "committed" if row.committed else row.note
        table.add_row(*map(plain, (name, date, *numbers, state)))
    # Where there is no terminal, Rich would break lines at 80 columns.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def show_results(place: str, as_json: bool) -> int:
    """Verify the checkpoints at `place` and print the results; returns the exit code, 1 if something is damaged."""
    checkpoints = checkpoints_at(place)
    results = verify_checkpoints(checkpoints)
    if as_json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    else:
        for result in results:
            for sentence in result.damages or [result.note or "good"]:
                print(shown(f"{result.folder}  {sentence}"))
    if all(result.good for result in results):
        return 0
    if not as_json:
        print(
            "Restore the named files from a copy, or rerun the training command: it resumes from the newest good "
            "checkpoint, and renames newer ones that are damaged."
        )
    return 1


def _listed(checkpoints: str, step: int) -> Listed:
    folder = open_folder(folder_of_step(checkpoints, step))
    name = folder.location.rsplit("/", 1)[-1]
    if folder.size(MANIFEST) is None:
        return Listed(name, False, NEVER_COMMITTED, step)
    try:
        manifest = read_checkpoint_manifest(folder.location)
    except UserError as error:
        return Listed(name, False, str(error), step)
    return Listed(
        folder=name,
        committed=True,
        step=step,
        date=datetime.fromtimestamp(folder.modified_at(MANIFEST)).isoformat(timespec="seconds"),
        ranks=manifest.world_size,
        zero_stage=manifest.zero_stage,
        parameters=sum(prod(shape) for shape in manifest.parameters.values()),
        bytes=sum(entry.bytes for entry in manifest.files),
        tokens=manifest.tokens,
    )


def _verify_one(location: str) -> VerifyResult:
    name = location.rsplit("/", 1)[-1]
    if open_folder(location).size(MANIFEST) is None:
        return VerifyResult(name, True, [], NEVER_COMMITTED)
    try:
        found = damages(location, read_checkpoint_manifest(location))
    except UserError as error:
        found = [str(error)]
    return VerifyResult(name, not found, found)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
