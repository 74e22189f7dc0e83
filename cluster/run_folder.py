"""A run's folder: one writer at a time, and one recipe for good."""

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cluster.recipe import Recipe, validate_recipe
from data_prep.files import write_atomically
from data_prep.rows import append_row
from pretrain.changes import CHANGES, Difference, binding_differences, check_allowed


class InUseError(ValueError):
    """Another process holds a folder."""


@contextmanager
def opened(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> Iterator[None]:
    """Hold the run for the length of a block, its resolved recipe written into it.

    A folder that a mistake of the user's (ValueError) would leave without anything worth keeping is removed again.

    Args:
        allowed: dotted keys whose changes are wanted, under a run that has begun.

    Raises:
        ValueError: another process holds it, or it was begun with a recipe that differs in what is not allowed.
    """
    is_new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    with held(run_dir):
        try:
            _write_recipe(run_dir, recipe, allowed)
            yield
        except ValueError:
            if is_new and not (run_dir / "checkpoints").exists():
                shutil.rmtree(run_dir)
            raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A lock on a folder; the holder's host and process stand in it for whoever comes second."""
    lock, holder = FileLock(folder / ".lock"), folder / ".holder"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text().strip() if holder.exists() else "another process"
        raise InUseError(f"{folder} is in use by {who}; wait for it, or end it") from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def note_change(run_dir: Path, key: str, changed: list[Difference]) -> None:
    """Write down that the change of a key was allowed: the ranks look there before they go on."""
    append_row(run_dir / CHANGES, {"key": key, "changed": changed, "time": time.time()})


def _write_recipe(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> None:
    path, now = run_dir / "recipe.json", recipe.model_dump(mode="json")
    if path.exists():
        # What an older version wrote lacks the keys that are new since: they have their defaults.
        then = validate_recipe(json.loads(path.read_text()), str(path)).model_dump(mode="json")
        changed = binding_differences(then, now)
        check_allowed(changed, allowed, str(run_dir))
        for entry in changed:
            note_change(run_dir, entry[0], [entry])
    content = json.dumps(now, indent=1).encode() + b"\n"
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)
