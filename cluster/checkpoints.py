"""`multihop checkpoints`: what checkpoints a run has, and whether every byte of them is as it was written."""

import json
import re
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from math import prod
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.progress import plain, progress_line
from data_prep.shown import shown
from pretrain.checkpoint import MANIFEST, damages, folder_of_step, list_steps, read_manifest
from pretrain.run_files import checkpoints_of, read_config
from pretrain.storage import open_folder

_SET_ASIDE = re.compile(r"step-\d+\.damaged-\w+")
NEVER_COMMITTED = "never committed: nobody reads it, and the next start of its run removes what that wrote"


@dataclass(frozen=True)
class Listed:
    """A checkpoint as its manifest describes it, or a folder that is none and why."""

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
    """Elements of all of them."""
    bytes: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Verdict:
    """What reading all of a checkpoint showed."""

    folder: str
    good: bool
    damages: list[str]
    """A sentence each."""
    note: str = ""


def checkpoints_at(place: str) -> str:
    """The location of the checkpoints that a user means by a run's folder or by the location itself.

    Raises:
        ValueError: there are none.
    """
    location = place.rstrip("/")
    if (Path(place) / "recipe.json").is_file():
        location = checkpoints_of(Path(place), read_config(Path(place)))
    if not list_steps(location):
        raise ValueError(
            f"{location} holds no checkpoints; give a run's folder, the folder that its step-… folders are in, or "
            "s3://BUCKET/PREFIX"
        )
    return location


def list_checkpoints(checkpoints: str) -> list[Listed]:
    """All folders of steps, oldest first, and after them those that were set aside as damaged."""
    rows = [_listed(checkpoints, step) for step in list_steps(checkpoints)]
    aside = [name for name in open_folder(checkpoints).names() if _SET_ASIDE.fullmatch(name)]
    return rows + [Listed(name, False, "set aside as damaged; remove it when it was looked at") for name in aside]


def verify_checkpoints(checkpoints: str) -> list[Verdict]:
    """Read all bytes of all checkpoints, oldest first."""
    steps, verdicts = list_steps(checkpoints), []
    with progress_line("verify   ") as line:
        for done, step in enumerate(steps):
            line.update(done, len(steps), f"step {step}")
            verdicts.append(_verdict(folder_of_step(checkpoints, step)))
        line.update(len(steps), len(steps))
    return verdicts


def show_list(place: str, as_json: bool) -> None:
    """Print the checkpoints at `place`."""
    rows = list_checkpoints(checkpoints_at(place))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    table = Table("step", "date", "ranks", "stage", "parameters", "size", "tokens", "state", box=None)
    for row in rows:
        cells = (row.ranks, row.zero_stage, row.parameters, row.bytes, row.tokens)
        numbers = ["" if cell is None else f"{cell:,}" for cell in cells]
        numbers[3] = "" if row.bytes is None else _size(row.bytes)
        name = row.folder if row.step is None else f"{row.step:,}"
        date, state = (row.date or "").replace("T", " "), "committed" if row.committed else row.note
        table.add_row(*map(plain, (name, date, *numbers, state)))
    # Where there is no terminal, Rich would break lines at 80 columns.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def show_verdicts(place: str, as_json: bool) -> int:
    """Print what verifying the checkpoints at `place` showed; the exit code: 1 where something is damaged."""
    checkpoints = checkpoints_at(place)
    verdicts = verify_checkpoints(checkpoints)
    if as_json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    else:
        for verdict in verdicts:
            for sentence in verdict.damages or [verdict.note or "good"]:
                print(shown(f"{verdict.folder}  {sentence}"))
    if all(verdict.good for verdict in verdicts):
        return 0
    if not as_json:
        print(
            "Bring the named files back from a copy, or start the run again: it goes on from its newest good "
            "checkpoint, and sets newer ones that are damaged aside."
        )
    return 1


def _listed(checkpoints: str, step: int) -> Listed:
    folder = open_folder(folder_of_step(checkpoints, step))
    name = folder.location.rsplit("/", 1)[-1]
    if folder.size(MANIFEST) is None:
        return Listed(name, False, NEVER_COMMITTED, step)
    try:
        manifest = read_manifest(folder.location)
    except ValueError as error:
        return Listed(name, False, str(error), step)
    return Listed(
        folder=name,
        committed=True,
        step=step,
        date=datetime.fromtimestamp(folder.changed_at(MANIFEST)).isoformat(timespec="seconds"),
        ranks=manifest.world_size,
        zero_stage=manifest.zero_stage,
        parameters=sum(prod(shape) for shape in manifest.parameters.values()),
        bytes=sum(entry.bytes for entry in manifest.files),
        tokens=manifest.tokens,
    )


def _verdict(location: str) -> Verdict:
    name = location.rsplit("/", 1)[-1]
    if open_folder(location).size(MANIFEST) is None:
        return Verdict(name, True, [], NEVER_COMMITTED)
    try:
        found = damages(location, read_manifest(location))
    except ValueError as error:
        found = [str(error)]
    return Verdict(name, not found, found)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
