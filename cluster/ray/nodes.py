"""Wait for a cluster with room for the ranks, ask its autoscaler for nodes, and keep the user informed."""

import time
from collections.abc import Set
from dataclasses import dataclass

from multihop.cluster.console import clock, console
from multihop.cluster.ray.watch import free_resources, ranks_by_node

_REMIND_S = 60.0
_SETTLED_S, _UNSETTLED_S = 3.0, 10.0
"""Seconds without a change after which free resources count as settled, and the longest wait for that. Ray frees what
ended processes held within a second, but other jobs may come and go all the time."""


@dataclass(frozen=True)
class _Capacity:
    """CPUs or GPUs of the live nodes, counted as whole ranks."""

    total: int
    free: int
    """Not reserved by other jobs; includes those of this driver's own ranks."""


class Nodes:
    """Says how many ranks the cluster has room for, and reports when that is too few. Use it in a with statement."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.kind = "CPU"
        """Each rank needs one: "GPU" once a node has one, else "CPU"."""
        self._seen: tuple[_Capacity, float] | None = None
        """The latest capacity, and since when it has been unchanged (`time.monotonic`)."""
        self._tried: int | None = None
        """The most ranks to request, after Ray failed to place more although they seemed to fit."""
        self._looks_since: float | None = None
        self._waits_since: float | None = None
        self._said = 0.0
        self._asked: float | None = None

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked is not None:
            _ask_for(self.kind, 0)  # nodes that nobody uses may end

    def room(self, unresponsive: Set[str] = frozenset()) -> int:
        """How many ranks fit on the live nodes, beside other jobs: `least` to `most`, or 0.

        Where it is less than `most`, the autoscaler is asked for nodes, if the cluster has one.

        Args:
            unresponsive: ids of nodes that do not count.
        """
        capacity, now = self._capacity(unresponsive), time.monotonic()
        if self._seen is None or self._seen[0] != capacity:
            self._seen = capacity, now
        if capacity.free < self._most and (self._asked is None or now - self._asked >= _REMIND_S):
            self._asked = now
            _ask_for(self.kind, self._most + capacity.total - capacity.free)
        if self._tried is not None and capacity.free <= self._tried:
            self._tried = None  # the cluster now reports the resources as taken
        room = min(capacity.free, self._most, self._tried or self._most)
        return room if room >= self._least else 0

    def room_to_start(self, unresponsive: Set[str] = frozenset()) -> int:
        """As `room`, but 0 for a few seconds while resources of ranks or tasks that just ended may not be free yet.

        Prints what it waits for: at once, every minute, and when the wait is over.
        """
        room, now = self.room(unresponsive), time.monotonic()
        assert self._seen is not None
        capacity, since = self._seen
        self._looks_since = self._looks_since or now
        is_settled = now - since >= _SETTLED_S or now - self._looks_since >= _UNSETTLED_S
        if room < self._most and capacity.free < capacity.total and not is_settled:
            return 0
        if room:
            self._looks_since = None
        self._tell(room, capacity)
        return room

    def on_placement_failure(self, ranks: int) -> None:
        """Request one rank less next time, but at least `least`."""
        self._tried = max(self._least, ranks - 1)
        next_try = "trying again" if self._tried == ranks else f"trying {self._tried}"
        console.print(f"{clock()} the cluster did not place {ranks} ranks, although they seemed to fit: {next_try}")

    def _capacity(self, unresponsive: Set[str]) -> _Capacity:
        import ray

        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        counted = alive.keys() - unresponsive
        if any("GPU" in alive[node] for node in counted):
            self.kind = "GPU"  # and stays so when those nodes are lost, and the head is left, which may have none
        free, own = free_resources(), ranks_by_node()
        return _Capacity(
            sum(int(alive[node].get(self.kind, 0)) for node in counted),
            # A rank needs a whole CPU or GPU of one node.
            sum(int(free.get(node, {}).get(self.kind, 0) + own[node]) for node in counted),
        )

    def _tell(self, room: int, capacity: _Capacity) -> None:
        now = time.time()
        if room:
            if self._waits_since is not None:
                console.print(
                    f"{clock()} the cluster has {capacity.free} free {self.kind}s again, after "
                    f"{now - self._waits_since:.0f} s"
                )
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since, self._said = now, 0.0
        if now - self._said < _REMIND_S:
            return
        self._said = now
        workers = self._most if self._least == self._most else f"[{self._least}, {self._most}]"
        waits, needs = f"since {clock(self._waits_since)}", f"{self.kind}s that cluster.workers={workers} needs"
        if capacity.total < self._least:
            console.print(
                f"{clock()} waiting for nodes {waits}: the cluster has {capacity.total} of the {self._least} {needs}; "
                "training resumes when they join"
            )
        else:
            console.print(
                f"{clock()} waiting for other jobs {waits}: {capacity.free} of the cluster's {capacity.total} "
                f"{self.kind}s are free, of the {self._least} {needs}; training resumes when they are"
            )


def _ask_for(kind: str, number: int) -> None:
    """Ray keeps the newest request of all drivers of a cluster, which is why it is repeated."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{kind: 1}] * number)
