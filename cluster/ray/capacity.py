"""Counts how many ranks a cluster has room for, and decides whether more ranks are worth a restart.

Waits for nodes, asks the autoscaler for them, and prints what it waits for.
"""

import time
from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from multihop.cluster.console import clock, console
from multihop.cluster.ray.watch import free_resources, ranks_by_node

_REMIND_S = 60.0
_SETTLED_S, _UNSETTLED_S = 3.0, 10.0
"""Seconds without a change after which free resources count as settled, and the longest wait for that. Ray frees what
ended processes held within a second, but other jobs may come and go all the time."""
_ROOM_SETTLED_S = 10.0
"""Nodes that join together do so within seconds; one restart is enough for them."""
_RECENT = 20
"""Rows of metrics.jsonl from which the time of a step is computed."""


@dataclass(frozen=True)
class _Count:
    """CPUs or GPUs of the live nodes, counted as whole ranks."""

    total: int
    free: int
    """Number that other jobs have not reserved, including those of this driver's ranks."""


class Capacity:
    """Counts how many ranks the cluster has room for, and prints when that is too few. Use it in a `with` block."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.kind = "CPU"
        """Each rank needs one: "GPU" once a node has one, else "CPU"."""
        self._seen: tuple[_Count, float] | None = None
        """The latest capacity, and since when it has been unchanged (`time.monotonic`)."""
        self._tried: int | None = None
        """The most ranks to request, after Ray failed to place more although they seemed to fit."""
        self._settling_since: float | None = None
        self._waiting_since: float | None = None
        self._printed_at = 0.0
        self._requested_at: float | None = None

    def __enter__(self) -> "Capacity":
        return self

    def __exit__(self, *_: object) -> None:
        if self._requested_at is not None:
            _request_nodes(self.kind, 0)  # nodes that nobody uses may end

    def room(self, unresponsive: Set[str] = frozenset()) -> int:
        """Return how many ranks fit on the live nodes beside other jobs: `least` to `most`, or 0.

        Where it is less than `most`, the autoscaler is asked for nodes, if the cluster has one.

        Args:
            unresponsive: ids of nodes that do not count.
        """
        capacity, now = self._count(unresponsive), time.monotonic()
        if self._seen is None or self._seen[0] != capacity:
            self._seen = capacity, now
        if capacity.free < self._most and (self._requested_at is None or now - self._requested_at >= _REMIND_S):
            self._requested_at = now
            _request_nodes(self.kind, self._most + capacity.total - capacity.free)
        if self._tried is not None and capacity.free <= self._tried:
            self._tried = None  # the cluster now reports the resources as taken
        room = min(capacity.free, self._most, self._tried or self._most)
        return room if room >= self._least else 0

    def room_to_start(self, unresponsive: Set[str] = frozenset()) -> int:
        """Return `room`, or 0 for a few seconds while resources of ranks or tasks that just ended may not be free yet.

        Prints what it waits for: at once, every minute, and when the wait is over.
        """
        room, now = self.room(unresponsive), time.monotonic()
        assert self._seen is not None
        capacity, since = self._seen
        self._settling_since = self._settling_since or now
        is_settled = now - since >= _SETTLED_S or now - self._settling_since >= _UNSETTLED_S
        if room < self._most and capacity.free < capacity.total and not is_settled:
            return 0
        if room:
            self._settling_since = None
        self._print_wait(room, capacity)
        return room

    def on_placement_failure(self, ranks: int) -> None:
        """Request one rank less next time, but at least `least`."""
        self._tried = max(self._least, ranks - 1)
        next_try = "trying again" if self._tried == ranks else f"trying {self._tried}"
        console.print(f"{clock()} the cluster did not place {ranks} ranks, although they seemed to fit: {next_try}")

    def _count(self, unresponsive: Set[str]) -> _Count:
        import ray

        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        counted = alive.keys() - unresponsive
        if self.kind == "CPU" and any("GPU" in alive[node] for node in counted):
            # It stays so when those nodes are lost, and the head is left, which may have none.
            self.kind, self._tried = "GPU", None
        free, ranks = free_resources(), ranks_by_node(self.kind)
        return _Count(
            sum(int(alive[node].get(self.kind, 0)) for node in counted),
            # A rank needs a whole CPU or GPU of one node.
            sum(int(free.get(node, {}).get(self.kind, 0) + ranks[node]) for node in counted),
        )

    def _print_wait(self, room: int, capacity: _Count) -> None:
        now = time.time()
        if room:
            if self._waiting_since is not None:
                console.print(
                    f"{clock()} the cluster has {capacity.free} free {self.kind}s again, after "
                    f"{now - self._waiting_since:.0f} s"
                )
            self._waiting_since = None
            return
        if self._waiting_since is None:
            self._waiting_since, self._printed_at = now, 0.0
        if now - self._printed_at < _REMIND_S:
            return
        self._printed_at = now
        workers = self._most if self._least == self._most else f"[{self._least}, {self._most}]"
        waits, needs = f"since {clock(self._waiting_since)}", f"{self.kind}s that cluster.workers={workers} needs"
        if capacity.total < self._least:
            console.print(
                f"{clock()} waiting for nodes {waits}: the cluster has {capacity.total} of the {self._least} {needs}; "
                "training resumes when they join"
            )
        else:
            console.print(
                f"{clock()} waiting for other jobs {waits}: {capacity.free} of the cluster's {capacity.total} "
                f"{self.kind}s are free, of the {self._least} {needs}; training resumes when enough are free"
            )


def has_gpus() -> bool:
    """Return whether a live node has GPUs."""
    return any("GPU" in resources for resources in _resources())


def has_room_for(ranks: int) -> bool:
    """Return whether the live nodes have CPUs, or GPUs if one has some, for these ranks, beside nothing else."""
    kind = "GPU" if has_gpus() else "CPU"
    return sum(int(resources.get(kind, 0)) for resources in _resources()) >= ranks


def has_free_room(ranks: int) -> bool:
    """Return whether there is room for these ranks beside all tasks and actors."""
    kind = "GPU" if has_gpus() else "CPU"
    return sum(int(free.get(kind, 0)) for free in free_resources().values()) >= ranks


def _resources() -> list[dict[str, float]]:
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class ScaleUpPolicy:
    """Compares what a restart costs, as the last start did, with the time that more ranks would save.

    Steps are assumed to be faster in proportion to the number of ranks: the most that a restart can gain.
    """

    def __init__(self, last_step: int) -> None:
        self._last_step = last_step
        self._requested_at = self._cost = 0.0
        self._rows: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._room, self._since = 0, 0.0

    def on_request(self, now: float) -> None:
        """Start to measure: ranks are requested."""
        self._requested_at, self._cost = now, 0.0
        self._rows.clear()
        self._room = 0

    def observe(self, row: dict[str, Any], now: float) -> None:
        """Take a row of metrics.jsonl; rows with a loss give the time of a step, by the clock of rank 0."""
        if "loss" in row and "time" in row:
            self._cost = self._cost or now - self._requested_at
            self._rows.append((row["step"], row["time"]))

    def is_worth_restart(self, ranks: int, room: int, now: float) -> bool:
        """Return whether to restart with `room` ranks instead of `ranks`, once that room is unchanged for ten
        seconds."""
        if room <= ranks:
            self._room = 0
            return False
        if room != self._room:
            self._room, self._since = room, now
        return now - self._since >= _ROOM_SETTLED_S and self.remaining_s() * (1 - ranks / room) > self._cost

    def remaining_s(self) -> float:
        """Return the seconds that the remaining steps will take with these ranks; 0 while that is unknown."""
        if len(self._rows) < 2:
            return 0.0
        (first, began), (step, ended) = self._rows[0], self._rows[-1]
        return (self._last_step - step) * (ended - began) / (step - first) if step > first else 0.0


def _request_nodes(kind: str, number: int) -> None:
    """Ray keeps the newest request of all drivers of a cluster, which is why it is repeated."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{kind: 1}] * number)
