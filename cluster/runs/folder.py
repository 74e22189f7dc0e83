"""A run's folder: one writer at a time, and one recipe."""

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from multihop.cluster.console import console
from multihop.cluster.runs.recipe import Recipe, validate_recipe
from multihop.common.errors import UserError
from multihop.common.files import check_not_link, make_folder, open_regular, read_json_object, write_atomically
from multihop.common.json_lines import append_row
from multihop.common.lease import HeldError
from multihop.pretrain.run.changes import CHANGES, Difference, check_allowed, locked_changes
from multihop.pretrain.run.check_start import check_steps_left
from multihop.pretrain.run.files import checkpoints_of

_Result = TypeVar("_Result")
_LOCK, _HOLDER = ".lock", ".holder"
_POLL_S = 1.0
_MADE_AGAIN = {"recipe.json", "data", "index", "summary.json", "tracking.json"}
"""What a start creates before its ranks start."""
_WRITTEN_INTO = ("eval", "eval/weights", "index", "logs", ".ray-train")


class InUseError(UserError):
    """A folder is locked by another process."""


@contextmanager
def opened(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> Iterator[None]:
    """Lock the run's folder for the length of a block, and write the resolved recipe into it.

    If the first start of a run ends in a mistake of the user's (UserError) before any rank was started, what it
    created is removed: the corrected recipe must not be refused as a changed one.

    Args:
        allowed: dotted keys that may change under a run that was started before.

    Raises:
        UserError: another process holds the lock, or the recipe differs from the run's in keys that are not allowed.
    """
    is_new = not run_dir.exists()
    try:
        make_folder(run_dir)
    except FileExistsError as error:
        raise UserError(f"{error.filename} is not a folder; choose another name or --runs, or move it away") from None
    except FileNotFoundError as error:  # the parent exists: its file system has no directories of users, as /proc
        raise UserError(f"{error.filename} cannot be created there; choose another --runs") from None
    with held(run_dir):
        before = set(os.listdir(run_dir))
        try:
            _check_links(run_dir)
            _write_recipe(run_dir, recipe, allowed)
            yield
        except UserError:
            _withdraw(run_dir, before, is_new)
            raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a folder, and write the host and process of the holder into it for the messages of others.

    The lock ends with the process, unless a forked child without exec outlives it.

    Raises:
        InUseError: another process holds it.
    """
    holder = folder / _HOLDER
    with _locked(folder) as is_mine:
        if not is_mine:
            raise InUseError(f"{folder} is in use by {_who(holder)}; wait for that process to end, or stop it")
        try:
            write_atomically(holder, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            yield
        finally:
            holder.unlink(missing_ok=True)


def when_free(attempt: Callable[[], _Result]) -> _Result:
    """What `attempt` returns, tried again for as long as another process holds what it needs."""
    printed = ""
    while True:
        try:
            return attempt()
        except (InUseError, HeldError) as error:
            if str(error) != printed:
                printed = str(error)
                console.print(f"waiting   {printed}")
            time.sleep(_POLL_S)


@contextmanager
def wait_for_lock(folder: Path) -> Iterator[None]:
    """`held`, once nobody else holds it; the folder is created if it does not exist."""
    make_folder(folder)
    with ExitStack() as stack:
        when_free(lambda: stack.enter_context(held(folder)))
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process holds the folder, by what the holder wrote: a look at the lock itself could get in its way.

    A holder on another host is taken to be alive; one on this host is looked for.
    """
    import psutil

    try:
        with open_regular(folder / _HOLDER) as file:
            noted = re.fullmatch(r"process (\d{1,9}) on (.+)\n", file.read(200).decode(errors="replace"))
    except OSError:
        return False
    return noted is None or noted[2] != socket.gethostname() or psutil.pid_exists(int(noted[1]))


def note_change(run_dir: Path, key: str, changed: list[Difference]) -> None:
    """Record that the change of a key was allowed; the ranks read it before they resume."""
    append_row(run_dir / CHANGES, {"key": key, "changed": changed, "time": time.time()})


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether the lock was acquired. It is on the folder and on a file in it: removing the file releases nothing."""
    check_not_link(folder / _LOCK)
    lock, descriptor = FileLock(folder / _LOCK), os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _acquired(descriptor, lock)
    finally:
        lock.release()
        os.close(descriptor)


def _acquired(descriptor: int, lock: FileLock) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # NFS locks only what is open for writing, which a folder never is; there the lock on the file is enough.
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _who(holder: Path) -> str:
    try:
        with open_regular(holder) as file:
            text = file.read(200).decode(errors="replace")
    except OSError:
        text = ""
    return "".join(letter for letter in text if letter.isprintable()) or "another process"


def check_recipe(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> list[Difference]:
    """The differences from the recipe that a run was started with, in keys that the user has allowed to change.

    Raises:
        UserError: it differs in keys that are not allowed.
    """
    path = run_dir / "recipe.json"
    # A recipe.json of an older version lacks newer keys, which have their defaults.
    advice = "restore it from a copy, or set name=… for a new run"
    then = validate_recipe(read_json_object(path, advice=advice), str(path)).model_dump(mode="json")
    changed = locked_changes(then, recipe.model_dump(mode="json"), Recipe)
    check_allowed(changed, Recipe, allowed, str(run_dir))
    return changed


def _check_links(run_dir: Path) -> None:
    """The run's folder, its data and its checkpoints may be links; files that are appended to may not."""
    for name in _WRITTEN_INTO:
        if (run_dir / name).is_symlink():
            raise UserError(
                f"{run_dir / name} is a link, which multihop does not write through; replace it by a folder"
            )
    for pattern in ("worker.lock", "*.jsonl", "eval/*.jsonl", "logs/rank-*.log"):
        for path in run_dir.glob(pattern):
            check_not_link(path)


def _withdraw(run_dir: Path, before: set[str], is_new: bool) -> None:
    created, data = set(os.listdir(run_dir)) - before, run_dir / "data"
    if "recipe.json" in before or created - _MADE_AGAIN or (data.is_dir() and not data.is_symlink()):
        return
    for path in (run_dir / name for name in created):
        if path.name == "index":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            path.unlink()
    if is_new and set(os.listdir(run_dir)) <= {_LOCK, _HOLDER}:
        for name in (_HOLDER, _LOCK):
            (run_dir / name).unlink(missing_ok=True)
        run_dir.rmdir()


def _write_recipe(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> None:
    path, now = run_dir / "recipe.json", recipe.model_dump(mode="json")
    if path.exists():
        if changed := check_recipe(run_dir, recipe, allowed):
            from multihop.pretrain.checkpoint.verify import newest_step  # imports torch

            check_steps_left(run_dir, recipe, newest_step(checkpoints_of(run_dir, recipe)) or 0)
        for entry in changed:
            note_change(run_dir, entry[0], [entry])
    content = json.dumps(now, indent=1).encode() + b"\n"
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content, mode=0o600)
