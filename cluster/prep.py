"""Data preparation on Ray tasks: the pure functions of `data_prep`, run anywhere in the cluster."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster.progress import console
from cluster.run_folder import InUseError, held
from data_prep.config import DataConfig, TokenizerConfig
from data_prep.files import make_folder
from data_prep.manifest import Manifest
from data_prep.pipeline import Progress, find_whole, identify, prepare, recall_identity

_RETRIES = 3
_LOOK_AGAIN_S = 1.0


class WorkersDied(Exception):
    """A task took its worker with it each time; the message is for the user."""


def provide(
    data: DataConfig, tokenizer: TokenizerConfig, store: Path, place: Path, progress: Progress
) -> tuple[Path, Manifest]:
    """The folder and manifest of a run's data set, every byte of which is as it was written.

    Runs that share one do not wait for each other; whoever has to write into `store` waits for another that does.

    Args:
        store: see `prepare_on_ray`.
        place: where the run has its data: a link into `store` or nothing yet, or what a copy of a run has there, a
            folder of its own. That one is used if it is what the recipe says, and never taken for it if it is not.

    Raises ValueError for anything else in `place`, and what `prepare_on_ray` raises.
    """
    work = work_of(store)
    identity = recall_identity(data, tokenizer, work)
    if not place.is_symlink() and place.exists():
        if identity is None:
            with _waited_for(store):
                identity = identify(data, tokenizer, work, map_on_ray, progress)
        manifest = find_whole(place, identity, map_on_ray, progress)
        if manifest is None:
            raise ValueError(
                f"{place} is not the link to the prepared data that a run has there, and what it holds is not whole or "
                "not made from the texts and settings of now; remove it, and a link takes its place, or set name=…"
            )
        return place, manifest
    if identity is not None:
        folder = store / identity[:16]
        manifest = find_whole(folder, identity, map_on_ray, progress)
        if manifest is not None and manifest.format_version > 1:
            return folder, manifest
    with _waited_for(store):
        return prepare_on_ray(data, tokenizer, store, progress)


def link(place: Path, folder: Path) -> None:
    """Let `place` be a link to the data set in `folder`, unless it is that folder; a link to another is replaced."""
    if place == folder:
        return
    target = os.path.relpath(folder, place.parent)
    if place.is_symlink() and os.readlink(place) != target:
        place.unlink()
    if not place.is_symlink():
        place.symlink_to(target)


def prepare_on_ray(
    data: DataConfig, tokenizer: TokenizerConfig, store: Path, progress: Progress
) -> tuple[Path, Manifest]:
    """Prepare a data set among those of the same sources in `store`, on the Ray that the caller has started.

    Its folder is named by settings and contents, so a data set that runs use is never replaced by another. `store` and
    the sources must be seen under the same paths on every node. A task whose worker dies is run again; what a task
    raises ends the preparation as it would without Ray.

    Raises WorkersDied for a task that nobody survives, and what `prepare` raises.
    """
    folder = store / identify(data, tokenizer, work_of(store), map_on_ray, progress)[:16]
    return folder, prepare(data, tokenizer, folder, map_on_ray, progress, work_of(store))


@contextmanager
def _waited_for(store: Path) -> Iterator[None]:
    """Hold `store`, once nobody else does."""
    make_folder(store)
    with ExitStack() as stack:
        told = ""
        while True:
            try:
                stack.enter_context(held(store))
                break
            except InUseError as error:
                if str(error) != told:
                    told = str(error)
                    console.print(f"waiting   {told}")
                time.sleep(_LOOK_AGAIN_S)
        yield


def work_of(store: Path) -> Path:
    """Where the stages of all data sets in `store` keep their outputs."""
    return store / "work"


def map_on_ray(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """The results of `function` on `items`, in the order in which they are done.

    At most twice as many tasks as the cluster has CPUs wait at a time: the next inputs are ready, and no more memory
    is held however many items there are.
    """
    import ray

    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(function)
    limit = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = iter(items)
    running: list[Any] = []
    try:
        for item in waiting:
            if len(running) == limit:
                done, running = ray.wait(running, num_returns=1)
                yield _result(done[0])
            running.append(task.remote(item))
        while running:
            done, running = ray.wait(running, num_returns=1)
            yield _result(done[0])
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _result(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # What the user or the disk did wrong is told as it is, without Ray's traceback around it.
        if isinstance(error.cause, ValueError | OSError):
            raise error.cause from None
        raise
    except (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
    ) as error:
        reason = next(line.strip() for line in str(error).splitlines() if line.strip())
        raise WorkersDied(
            f"a task of the preparation died {_RETRIES + 1} times with its worker, probably for want of memory "
            f"({reason}); give the nodes more or tell Ray of fewer CPUs; the same command goes on from here"
        ) from error
