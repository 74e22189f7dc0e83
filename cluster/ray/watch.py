"""Detects nodes that stopped responding, sooner than Ray's health check does, and those about to be removed."""

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

NODE_ID = "ray.io/node-id"
"""The label by which Ray's selectors name a node."""
_EVERY_S = 1.0
_TIMEOUT_S = 2.0
_SILENT_S = 8.0
"""A link that is down for five seconds costs the connections nothing; one that is down for longer costs a restart."""
_AT_ONCE = 64


class Watch:
    """Connects to each live node once a second.

    Only time during which this process polled counts as unresponsive: after a pause of this process (a suspended
    laptop, a stalled machine) all nodes would seem to have been unresponsive.
    """

    def __init__(self) -> None:
        self._silence: tuple[dict[str, float], float] = {}, time.monotonic()
        """Seconds without an answer by node, and when they were determined (`time.monotonic`)."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node watch", daemon=True)

    def unresponsive(self) -> set[str]:
        """Return the ids of nodes that Ray reports as alive and that have not answered for 8 seconds."""
        silent_s, polled_at = self._silence
        return {node for node, seconds in silent_s.items() if seconds + _passed_since(polled_at) > _SILENT_S}

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            answers, (silent_s, polled_at) = _answers(), self._silence
            passed = _passed_since(polled_at)
            silent_s = {node: 0.0 if answers[node] else silent_s.get(node, 0.0) + passed for node in answers}
            self._silence = silent_s, time.monotonic()


def _passed_since(polled_at: float) -> float:
    """Return the seconds since `polled_at`, at most one polling period: a longer gap is a pause of this process."""
    return min(time.monotonic() - polled_at, _EVERY_S + _TIMEOUT_S)


@contextmanager
def watch_nodes() -> Iterator[Watch]:
    """Watch the cluster for the length of a block."""
    watch = Watch()
    watch._thread.start()
    try:
        yield watch
    finally:
        watch._ended.set()
        watch._thread.join()


def unreachable_nodes() -> set[str]:
    """Return the ids of nodes that Ray reports as alive and that do not answer now. Takes 2 seconds if there are
    any."""
    return {node for node, answers in _answers().items() if not answers}


def draining_nodes() -> set[str]:
    """Return the ids of nodes that are to be removed, by an autoscaler, a preemption notice or `ray drain-node`. Ray
    places no actors or tasks on them."""
    import ray

    return set(ray._private.state.state.get_draining_nodes())  # as in Ray Train; no public function exists


def free_resources() -> dict[str, dict[str, float]]:
    """Return the resources that no task or actor has reserved, by the node's id and by Ray's names of resources."""
    import ray

    # ray.available_resources() has only the sum over all nodes.
    return ray._private.state.state.available_resources_per_node()


def ranks_by_node(kind: str | None = None) -> Counter[str]:
    """Return the number of ranks of this driver by the id of the node on which they are placed.

    Args:
        kind: count only ranks that have reserved this resource, "CPU" or "GPU".
    """
    return Counter(
        node
        for group in _groups().values()
        if group["state"] == "CREATED"
        for bundle, node in group["bundles_to_node_id"].items()
        if kind is None or group["bundles"][bundle].get(kind)
    )


def abandon_ranks() -> None:
    """End all ranks of this driver at once, and free what they hold. Ray Train would wait five seconds for an answer of
    those that are lost."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for key in _groups():
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(key))))


def _groups() -> dict[str, Any]:
    import ray
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()  # a placement group's id ends with that of its job
    groups = placement_group_table().items()
    return {key: group for key, group in groups if key.endswith(job) and group["state"] != "REMOVED"}


def _answers() -> dict[str, bool]:
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(_connects, ((node["NodeManagerAddress"], node["NodeManagerPort"]) for node in alive))
        return {node["NodeID"]: each for node, each in zip(alive, answers, strict=True)}


def _connects(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_TIMEOUT_S).close()
    except OSError:
        return False
    return True
