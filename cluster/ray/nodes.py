"""Wait for a cluster with room for all ranks, and keep the user informed."""

import time
from collections.abc import Set

from cluster.console import clock, console

_REMIND_S = 60.0


class Nodes:
    """Reports when the cluster has too few GPUs or CPUs for the ranks, and since when."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._since: float | None = None
        self._said = 0.0

    def room(self, silent: Set[str] = frozenset()) -> int:
        """How many ranks the live nodes have room for: `least` to `most`, or 0.

        Prints it at first, every minute while it is 0, and when that ends.

        Args:
            silent: ids of nodes that do not count.
        """
        import ray

        alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in silent]
        kind = "GPU" if any("GPU" in resources for resources in alive) else "CPU"
        there, now = int(sum(resources.get(kind, 0) for resources in alive)), time.time()
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
