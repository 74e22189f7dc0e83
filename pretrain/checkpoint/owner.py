"""Ownership of a checkpoint location: which run may write there."""

import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from multihop.common.errors import UserError
from multihop.common.files import canonical_json, json_object, open_regular
from multihop.common.s3 import no_conditional_writes
from multihop.common.storage import open_folder

IDENTITY = "identity"
"""File in a run's folder with the run's id."""
_OWNER = "owner"
"""File next to the checkpoints that names their run."""
_RUN_ID = "^[0-9a-f]{32}$"


class Owner(BaseModel):
    """The run that owns a checkpoint location, and where the run's folder was when it claimed the location."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = Field(pattern=_RUN_ID)
    host: str
    run_dir: str
    """The run's folder as an absolute path, with links resolved."""
    inode: int
    """Inode of the identity file in the run's folder. A copy of the folder has another inode; a folder that was moved,
    or is on a shared file system of several hosts, has the same."""
    since_format_2: bool = False
    """Whether the run has owned the location since format version 2, whose manifests have no run id."""

    def is_same(self, other: "Owner") -> bool:
        """Whether both are the same run folder, and not a copy of it."""
        same_path = (self.host, self.run_dir) == (other.host, other.run_dir)
        return self.run == other.run and (same_path or self.inode == other.inode)


def claim_checkpoints(run_dir: Path, location: str, remote_run: str | None = None) -> str:
    """Check that a run can write its checkpoints to a location, and that no other run owns it; returns the run's id.

    If several runs claim a location at once, one succeeds. A copy of a run's folder is another run, unless the location
    is inside the folder and was copied with it.

    Args:
        remote_run: The location of the run if it is in an object store, where its id is stored; `run_dir` is then a
            node's copy.

    Raises:
        UserError: The location cannot be written to, or another run owns it.
    """
    claimant = _owner_of(run_dir) if remote_run is None else _owner_of_remote_run(remote_run)
    try:
        folder = open_folder(location)
        owner = read_owner(location)
        if owner is None:
            data = _json_of(claimant)
            if folder.create(_OWNER, data, claimant.run[:8]):
                if folder.create(_OWNER, data, claimant.run[:8]):  # some stores accept the condition and ignore it
                    raise UserError(no_conditional_writes(location))
                return claimant.run
            owner = read_owner(location)
            assert owner is not None, "a run claimed it and removed the claim at once"
        inside = folder.is_local and Path(location).resolve().is_relative_to(run_dir.resolve())
        if owner.run == claimant.run and (inside or not owner.run_dir or owner.is_same(claimant)):
            claimant = claimant.model_copy(update={"since_format_2": owner.since_format_2})
            if claimant != owner:
                folder.write_atomically(_OWNER, _json_of(claimant))
            return claimant.run
    except OSError as error:
        raise UserError(
            f"{location} cannot be written to ({error}); correct checkpoint.location or its permissions"
        ) from None
    where = f", the one in {owner.run_dir} on host {owner.host}" if owner.run_dir else ""
    raise UserError(
        f"{location} holds the checkpoints of another run{where}; choose another name or checkpoint.location, or "
        f"remove its file {_OWNER} if that run no longer exists and this is the same run, moved or restored"
    )


def read_owner(location: str) -> Owner | None:
    """The owner of a location; None: no run has claimed it.

    Raises:
        UserError: The owner's file is damaged.
    """
    path = f"{location}/{_OWNER}"
    try:
        data = open_folder(location).read_bytes(_OWNER)
    except FileNotFoundError:
        return None
    if re.fullmatch(_RUN_ID, text := data.decode(errors="replace").strip()):  # as before format version 3
        return Owner(run=text, host="", run_dir="", inode=0, since_format_2=True)
    advice = "restore it from a copy, or remove it if the checkpoints there belong to this run"
    try:
        return Owner.model_validate(json_object(data, path, advice=advice))
    except ValidationError:
        raise UserError(f"{path} does not say which run owns the checkpoints there; {advice}") from None


def _owner_of(run_dir: Path) -> Owner:
    """The run of a folder; assigns an id if it has none."""
    path = run_dir / IDENTITY
    advice = "restore it from a copy; without it, this is another run than the one that owns checkpoint.location"
    if not path.exists():
        content = canonical_json({"run": secrets.token_hex(16)})
        open_folder(str(run_dir)).create(IDENTITY, content, secrets.token_hex(4))
    with open_regular(path) as file:
        data = file.read(1000)
        inode = os.fstat(file.fileno()).st_ino
    run: Any = data.decode(errors="replace").strip()
    if not re.fullmatch(_RUN_ID, run):
        run = json_object(data, path, advice=advice).get("run")
    try:
        return Owner(run=run, host=socket.gethostname(), run_dir=str(run_dir.resolve()), inode=inode)
    except ValidationError:
        raise UserError(f"{path} does not say which run this is; {advice}") from None


def _owner_of_remote_run(location: str) -> Owner:
    """Return the run at a location in an object store, which gets an id if it has none."""
    folder = open_folder(location)
    folder.create(IDENTITY, canonical_json({"run": secrets.token_hex(16)}), secrets.token_hex(4))
    content = json_object(folder.read_bytes(IDENTITY), f"{location}/{IDENTITY}")
    try:
        return Owner(run=str(content.get("run")), host="", run_dir=location, inode=0)
    except ValidationError:
        raise UserError(f"{location}/{IDENTITY} does not say which run this is; restore it from a copy") from None


def _json_of(owner: Owner) -> bytes:
    return canonical_json(owner.model_dump())
