"""Data preparation on Ray tasks: the pure functions of `data_prep`, run anywhere in the cluster."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.config import DataConfig, TokenizerConfig
from data_prep.manifest import Manifest
from data_prep.pipeline import Progress, identify, prepare

_RETRIES = 3


class WorkersDied(Exception):
    """A task took its worker with it each time; the message is for the user."""


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
