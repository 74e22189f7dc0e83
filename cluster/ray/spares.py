"""On each node with ranks, a process that has imported what a rank needs, for a restart."""

import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

_READY_S = 0.01
_LEFT_BYTES = 2 * 2**30
"""A node with less free memory starts no spare, which takes about 450 MB: its ranks need the memory more."""


class Spares:
    """Starts them, and knows those that are ready. They end with this driver."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = str(run_dir)
        self._keepers: dict[str, tuple[Any, Any]] = {}
        self._names: dict[str, str] = {}

    def start_on(self, nodes: Set[str]) -> None:
        """Start one on each of these nodes that has none. Importing takes it a few seconds of one core."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for node in nodes - self._keepers.keys():
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            keeper: Any = ray.remote(_Keeper).options(num_cpus=0, scheduling_strategy=where).remote(self._run_dir)
            self._keepers[node] = keeper, keeper.name.remote()

    def ready(self) -> dict[str, str]:
        """Node -> name of its spare, as `start_rank` wants it. A spare that could not be started, or was lost with its
        node, is missing: ranks there import by themselves."""
        import ray

        asked = {answer: node for node, (_, answer) in self._keepers.items() if node not in self._names}
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=_READY_S)[0] if asked else ():
            node = asked[answer]
            try:
                self._names[node] = ray.get(answer)
            except ray.exceptions.RayError:
                del self._keepers[node]
        return dict(self._names)


class _Keeper:
    """A Ray actor whose child is the spare, which ends with it."""

    def __init__(self, run_dir: str) -> None:
        """Start the process.

        Raises:
            RuntimeError: The node has too little free memory.
        """
        import psutil

        if psutil.virtual_memory().available < _LEFT_BYTES:
            raise RuntimeError("too little free memory for a spare process")
        command = [sys.executable, "-P", "-m", "multihop.pretrain.run.spare", run_dir]
        self._spare = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def name(self) -> str:
        """Its name, once it is ready.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._spare.stdout is not None
        name = self._spare.stdout.readline().strip()
        if not name:
            raise RuntimeError(f"a spare process exited with code {self._spare.wait()}")
        return name
