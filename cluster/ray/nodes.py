"""Wait for a cluster with room for all ranks, ask its autoscaler for nodes, and keep the user informed."""

import time
from collections.abc import Set

from cluster.console import clock, console

_REMIND_S = 60.0


class Nodes:
    """Reports when the cluster has too few GPUs or CPUs for the ranks, and since when. Use it in a with statement."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.kind = "CPU"
        """Each rank needs one: "GPU" once a node has one, else "CPU"."""
        self._since: float | None = None
        self._said = 0.0
        self._asked = 0.0

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        if self._asked:
            _ask_for(self.kind, 0)  # nodes that nobody uses may end

    def room(self, silent: Set[str] = frozenset()) -> int:
        """How many ranks the live nodes have room for: `least` to `most`, or 0.

        Prints it at first, every minute while it is 0, and when that ends. Where it is less than `most`, the autoscaler
        is asked for nodes, if the cluster has one.

        Args:
            silent: ids of nodes that do not count.
        """
        import ray

        alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in silent]
        if any("GPU" in resources for resources in alive):
            self.kind = "GPU"  # and stays so when those nodes are lost, and the head is left, which may have none
        kind = self.kind
        there, now = int(sum(resources.get(kind, 0) for resources in alive)), time.time()
        if there < self._most and now - self._asked >= _REMIND_S:
            self._asked = now
            _ask_for(kind, self._most)
        if there >= self._least:
            if self._since is not None:
                console.print(f"{clock()} the cluster has {there} {kind}s again, after {now - self._since:.0f} s")
            self._since = None
            return min(there, self._most)
        if self._since is None:
            self._since, self._said = now, 0.0
        if now - self._said >= _REMIND_S:
            self._said = now
            workers = self._most if self._least == self._most else f"[{self._least}, {self._most}]"
            console.print(
                f"{clock()} waiting for nodes since {clock(self._since)}: the cluster has {there} of the "
                f"{self._least} {kind}s that cluster.workers={workers} needs; training resumes when they join"
            )
        return 0


def _ask_for(kind: str, number: int) -> None:
    """Ray keeps the newest request of all drivers of a cluster, which is why it is repeated."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[{kind: 1}] * number)
