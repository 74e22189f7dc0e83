"""Maps a function over items as Ray tasks."""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multihop.cluster.interrupts import raise_if_interrupted
from multihop.cluster.ray import WorkerDiedError
from multihop.cluster.ray.slow_start import TaskStartProbe
from multihop.common.errors import UserError

RETRIES = 3
_RESULTS_ARRIVE_S = 0.1
"""Seconds in which the results of tasks that have just ended arrive."""
_ENDS_S = 5.0
"""Seconds for a task to end after it was interrupted, or killed."""


@dataclass(frozen=True)
class Resources:
    """Resources that Ray reserves for a task."""

    cpus: float = 1
    gpus: float = 0
    """Ignored on a cluster without GPUs; a fraction shares one."""
    memory_bytes: float = 0
    on_this_node: bool = False
    """Whether tasks run only on the node of the caller, because they read its files."""


def map_on_ray(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    what: Callable[[Any], str] = lambda item: "a task of the preparation",
    resources: Resources = Resources(),
    on_death: Callable[[Any, WorkerDiedError], Any] | None = None,
) -> Iterator[Any]:
    """Run `function` on each item as a Ray task, and yield the results in the order of completion.

    A task whose worker dies is retried. At most twice as many tasks as the cluster can run at once are submitted at a
    time: the next inputs are ready, and memory does not grow with the number of items. While none has started,
    a line is printed every minute about what they wait for.

    Args:
        what: returns the name of an item for the message about a worker that died.
        on_death: the result for an item whose worker died at each attempt; None: that is an error.

    Raises:
        WorkerDiedError: a task's worker died at each attempt.
        UserError, OSError: raised by the task, without Ray's traceback around it.
    """
    import ray

    available = _this_node()["Resources"] if resources.on_this_node else ray.cluster_resources()
    gpus = resources.gpus if available.get("GPU", 0) else 0
    # A head without CPUs for tasks runs tasks that read its files all the same.
    cpus = min(resources.cpus, available.get("CPU", 0)) if resources.on_this_node else resources.cpus
    probe = TaskStartProbe()
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, memory=resources.memory_bytes, max_retries=RETRIES)(
        probe.wrap(interruptible(function))
    )
    if resources.on_this_node:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(_this_node()["NodeID"], soft=False))
    at_once = available.get("GPU", 0) / gpus if gpus else available.get("CPU", 1) / (cpus or 1)
    limit = 2 * max(1, int(at_once))
    running: dict[Any, Any] = {}

    def next_result() -> Any:
        while not (done := ray.wait(list(running), num_returns=1, timeout=probe.poll_interval_s())[0]):
            probe.report({"CPU": cpus, "GPU": gpus, "memory": resources.memory_bytes})
            raise_if_interrupted()
        (reference,) = done
        item = running.pop(reference)
        try:
            return _result(reference, what(item))
        except WorkerDiedError as error:
            if on_death is None:
                raise
            return on_death(item, error)

    try:
        for item in items:
            raise_if_interrupted()
            if len(running) == limit:
                yield next_result()
            running[task.remote(item)] = item
        while running:
            raise_if_interrupted()
            yield next_result()
    finally:
        cancel_tasks(list(running))
        probe.close()


def interruptible(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as `cancel_tasks` can interrupt it.

    Ray interrupts a task through Python's handler for SIGINT. A worker has none if Ray was started by a process that
    ignores this signal, as do commands that a script starts in the background.
    """

    def call(*arguments: Any) -> Any:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return function(*arguments)

    return call


def cancel_tasks(references: list[Any]) -> None:
    """Interrupt tasks, which then remove their temporary files; those that do not end are killed.

    The tasks' functions must be `interruptible`, or all are killed.

    Ray's driver exits with a failed check ("Tried to complete task that was not pending") if it cancels a task just
    when the result arrives. A signal interrupts `ray.wait` at such a moment, so this waits for a while first, and
    cancels no task that has ended.
    """
    import ray

    def unfinished(references: list[Any], timeout_s: float) -> list[Any]:
        return ray.wait(references, num_returns=len(references), timeout=timeout_s)[1] if references else []

    left = unfinished(references, _RESULTS_ARRIVE_S)
    for force in (False, True):
        for reference in left:
            if unfinished([reference], 0):
                ray.cancel(reference, force=force)
        left = unfinished(left, _ENDS_S)


def _this_node() -> dict[str, Any]:
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    node: dict[str, Any] = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return node


def _result(reference: Any, name: str) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError | OSError):
            raise error.cause from None
        raise
    except (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
    ) as error:
        reason = next(line.strip() for line in str(error).splitlines() if line.strip())
        cause, advice = "probably out of memory", "give the nodes more memory or Ray fewer CPUs, then rerun"
        if isinstance(error, ray.exceptions.NodeDiedError):
            cause, advice = "with its node", "rerun"
        raise WorkerDiedError(
            f"the worker of {name} died {RETRIES + 1} times, {cause} ({reason}); {advice} the same command to resume"
        ) from error
