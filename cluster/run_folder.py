"""A run's folder: one writer at a time, and one recipe for good."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from cluster.recipe import FREE_SECTIONS, Recipe, differences
from data_prep.files import write_atomically

_SHOWN = 5


@contextmanager
def opened(run_dir: Path, recipe: Recipe) -> Iterator[None]:
    """Hold the run for the length of a block, its resolved recipe written into it.

    A folder that a mistake of the user's (ValueError) would leave without anything worth keeping is removed again.

    Raises:
        ValueError: another process holds it, or it was begun with a recipe that differs in more than `FREE_SECTIONS`.
    """
    is_new = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    with held(run_dir):
        try:
            _write_recipe(run_dir / "recipe.json", recipe)
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
        raise ValueError(f"{folder} is in use by {who}; wait for it, end it, or choose another name") from None
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _write_recipe(path: Path, recipe: Recipe) -> None:
    now = recipe.model_dump(mode="json")
    if path.exists():
        then = json.loads(path.read_text())
        if then == now:
            return
        changed = [entry for entry in differences(then, now) if not _is_free(entry[0])]
        if changed:
            raise ValueError(
                f"{path.parent} was begun with another recipe ({_list(changed)}); set name=… for another run"
            )
    write_atomically(path, json.dumps(now, indent=1).encode() + b"\n")


def _is_free(key: str) -> bool:
    return key.split(".")[0] in FREE_SECTIONS


def _list(changed: list[tuple[str, Any, Any]]) -> str:
    shown = [f"{key} was {json.dumps(then)}, is {json.dumps(now)}" for key, then, now in changed[:_SHOWN]]
    more = len(changed) - _SHOWN
    return "; ".join(shown) + (f" and {more} more" if more > 0 else "")
