"""A run's folder: locked by one start at a time, and of one recipe."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from multihop.cluster.locks import HOLDER, LOCK, lock_folder
from multihop.cluster.runs.recipe import Recipe, validate_recipe
from multihop.common.errors import UserError
from multihop.common.files import check_not_link, make_folder, read_json_object, write_atomically
from multihop.common.json_lines import append_row
from multihop.pretrain.run.changes import CHANGES, Difference, check_allowed, locked_changes
from multihop.pretrain.run.check_start import check_steps_left
from multihop.pretrain.run.files import checkpoints_of

_MADE_AGAIN = {"recipe.json", "data", "index", "summary.json", "tracking.json"}
"""Files and folders that a command creates before it launches the ranks."""
_WRITTEN_INTO = ("eval", "eval/weights", "index", "logs", ".ray-train")


@contextmanager
def locked_run_dir(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> Iterator[None]:
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
        raise UserError(
            f"{error.filename} is not a directory; choose another name or --runs, or move it away"
        ) from None
    except FileNotFoundError as error:  # the parent exists: its file system has no directories of users, as /proc
        raise UserError(f"{error.filename} cannot be created; choose another --runs") from None
    with lock_folder(run_dir):
        before = set(os.listdir(run_dir))
        try:
            _check_links(run_dir)
            _write_recipe(run_dir, recipe, allowed)
            yield
        except UserError:
            _withdraw(run_dir, before, is_new)
            raise


def note_change(run_dir: Path, key: str, changed: list[Difference]) -> None:
    """Record that the change of a key was allowed; the ranks read it before they resume."""
    append_row(run_dir / CHANGES, {"key": key, "changed": changed, "time": time.time()})


def check_recipe(run_dir: Path, recipe: Recipe, allowed: Sequence[str]) -> list[Difference]:
    """Return the differences from the recipe that a run was started with, in keys that the user has allowed to change.

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
                f"{run_dir / name} is a link, which multihop does not write through; replace it by a directory"
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
    if is_new and set(os.listdir(run_dir)) <= {LOCK, HOLDER}:
        for name in (HOLDER, LOCK):
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
