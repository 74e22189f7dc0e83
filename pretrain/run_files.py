"""What stands where in a run's folder."""

import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from data_prep.files import canonical_json, json_object, open_regular, read_json_object
from pretrain.bucket import no_conditions
from pretrain.config import TrainingConfig
from pretrain.storage import open_folder

GAVE_UP = "gave-up.json"
"""Why no rank should be started again as things are: {"code": the exit code, "message": one sentence}."""

_IDENTITY = "identity"
"""In a run's folder: which run it is."""
_OWNER = "owner"
"""Beside the checkpoints: which run's they are."""
_RUN_ID = "^[0-9a-f]{32}$"


def read_config(run_dir: Path) -> TrainingConfig:
    """The part of RUN_DIR/recipe.json that training reads.

    Raises:
        ValueError: there is none, or it is not a resolved recipe.
    """
    path = run_dir / "recipe.json"
    try:
        recipe = read_json_object(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; `multihop train RECIPE` writes it") from None
    try:
        return TrainingConfig.model_validate({key: recipe[key] for key in TrainingConfig.model_fields if key in recipe})
    except ValidationError as error:
        mistakes = [
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        ]
        raise ValueError(f"{path}: {'; '.join(mistakes)}; correct the recipe") from None


def checkpoints_of(run_dir: Path, config: TrainingConfig) -> str:
    """Where the run's checkpoints stand: an absolute path or s3://BUCKET/PREFIX."""
    location = config.checkpoint.location
    return f"{location.rstrip('/')}/{config.name}" if location else str(run_dir.absolute() / "checkpoints")


class Owner(BaseModel):
    """Which run a place of checkpoints belongs to, and where its folder was when it said so."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(pattern=_RUN_ID)
    host: str
    run_dir: str
    """Absolute, without links."""
    inode: int
    """Of the run folder's file identity. A copy has another one; a folder that was moved, and one on a shared file
    system as another host sees it, have the same."""
    since_format_2: bool = False
    """Whether the place was this run's when checkpoints did not say yet whose they are."""

    def is_same(self, other: "Owner") -> bool:
        """Whether both are one run folder, and none a copy of the other."""
        here = (self.host, self.run_dir) == (other.host, other.run_dir)
        return self.run == other.run and (here or self.inode == other.inode)


def claim_checkpoints(run_dir: Path, location: str) -> str:
    """Make sure that the place of a run's checkpoints can be written to, and is no other run's; the run's id.

    Of any number of runs that claim a place at once, one owns it. A copy of a run's folder is another run, unless the
    place lies in it, and was copied with it.

    Raises:
        ValueError: it cannot be written to, or is another run's.
    """
    mine = _owner_of(run_dir)
    try:
        folder = open_folder(location)
        found = read_owner(location)
        if found is None:
            data = _json_of(mine)
            if folder.create(_OWNER, data, mine.run[:8]):
                if folder.create(_OWNER, data, mine.run[:8]):  # some stores take the condition, and ignore it
                    raise ValueError(no_conditions(location))
                return mine.run
            found = read_owner(location)
            assert found is not None, "somebody else claimed it, and gave it back at once"
        inside = folder.is_local and Path(location).resolve().is_relative_to(run_dir.resolve())
        if found.run == mine.run and (inside or not found.run_dir or found.is_same(mine)):
            mine = mine.model_copy(update={"since_format_2": found.since_format_2})
            if mine != found:
                folder.write_atomically(_OWNER, _json_of(mine))
            return mine.run
    except OSError as error:
        raise ValueError(
            f"{location} cannot be written to ({error}); correct checkpoint.location or its permissions"
        ) from None
    where = f", the one in {found.run_dir} on host {found.host}" if found.run_dir else ""
    raise ValueError(
        f"{location} holds the checkpoints of another run{where}; choose another name or checkpoint.location, or "
        f"remove its file {_OWNER} if that run is gone and this one is it, moved or restored"
    )


def read_owner(location: str) -> Owner | None:
    """Who claimed a place; None: nobody.

    Raises:
        ValueError: nobody can tell.
    """
    path = f"{location}/{_OWNER}"
    try:
        data = open_folder(location).read_bytes(_OWNER)
    except FileNotFoundError:
        return None
    if re.fullmatch(_RUN_ID, text := data.decode(errors="replace").strip()):  # as it was before the third format
        return Owner(run=text, host="", run_dir="", inode=0, since_format_2=True)
    advice = "restore it from a copy, or remove it if the checkpoints there are this run's"
    try:
        return Owner.model_validate(json_object(data, path, advice=advice))
    except ValidationError:
        raise ValueError(f"{path} does not say whose the checkpoints there are; {advice}") from None


def _owner_of(run_dir: Path) -> Owner:
    """The run of a folder, which gets an id where it has none."""
    path = run_dir / _IDENTITY
    advice = "restore it from a copy; without it, checkpoint.location is another run's"
    if not path.exists():
        content = canonical_json({"run": secrets.token_hex(16)})
        open_folder(str(run_dir)).create(_IDENTITY, content, secrets.token_hex(4))
    with open_regular(path) as file:
        data = file.read(1000)
        inode = os.fstat(file.fileno()).st_ino
    run: Any = data.decode(errors="replace").strip()
    if not re.fullmatch(_RUN_ID, run):
        run = json_object(data, path, advice=advice).get("run")
    try:
        return Owner(run=run, host=socket.gethostname(), run_dir=str(run_dir.resolve()), inode=inode)
    except ValidationError:
        raise ValueError(f"{path} does not say which run this is; {advice}") from None


def _json_of(owner: Owner) -> bytes:
    return canonical_json(owner.model_dump())
