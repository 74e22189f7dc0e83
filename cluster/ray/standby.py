"""Standby processes, one on each node with ranks, that have imported what a rank needs, for a restart."""

import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from multihop.common.machine import available_memory

_READY_S = 0.01
_LEFT_BYTES = 2 * 2**30
"""Least free memory of a node that starts a standby process, which takes about 450 MB: ranks need memory more."""


class StandbyWorkers:
    """Starts standby processes and knows which are ready. They end with this driver."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = str(run_dir)
        self._hosts: dict[str, tuple[Any, Any]] = {}
        self._names: dict[str, str] = {}

    def start_on(self, nodes: Set[str]) -> None:
        """Start a standby process on each of these nodes that has none. It imports for a few seconds on one core."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in nodes - self._hosts.keys():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            host: Any = ray.remote(StandbyHost).options(num_cpus=0, scheduling_strategy=strategy).remote(self._run_dir)
            self._hosts[node] = host, host.name.remote()

    def ready(self) -> dict[str, str]:
        """Return the name of each node's standby process, as `start_rank` takes it.

        A node is missing if its process could not be started or was lost: ranks on it import by themselves.
        """
        import ray

        pending = {answer: node for node, (_, answer) in self._hosts.items() if node not in self._names}
        for answer in ray.wait(list(pending), num_returns=len(pending), timeout=_READY_S)[0] if pending else ():
            node = pending[answer]
            try:
                self._names[node] = ray.get(answer)
            except ray.exceptions.RayError:
                del self._hosts[node]
        return dict(self._names)


class StandbyHost:
    """A Ray actor whose child is the standby process, which ends with it."""

    def __init__(self, run_dir: str) -> None:
        """Start the process.

        Raises:
            RuntimeError: The node has too little free memory.
        """
        if available_memory() < _LEFT_BYTES:
            raise RuntimeError("too little free memory for a standby process")
        command = [sys.executable, "-P", "-m", "multihop.pretrain.run.standby", run_dir]
        self._standby = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def name(self) -> str:
        """Wait until the standby process is ready; returns its name.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._standby.stdout is not None
        name = self._standby.stdout.readline().strip()
        if not name:
            raise RuntimeError(f"a standby process exited with code {self._standby.wait()}")
        return name
