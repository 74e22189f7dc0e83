"""Explains why ranks or tasks have not started: no free resources, or worker processes that Ray failed to start."""

import os
import re
import secrets
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multihop.cluster.console import clock, console
from multihop.cluster.ray.watch import free_resources
from multihop.common.files import open_regular
from multihop.common.redaction import safe_text

SLOW_S = 60.0
"""Seconds without a start after which, and between which, the reason is printed."""
_RANK = "RayTrainWorker"
"""Class name of Ray Train's actors, one per rank."""
_CONTROLLER = "TrainController"
"""Class name of Ray Train's actor that starts the ranks."""
_LOG_PATTERNS = {"raylet.err": "", "raylet.out": r" [WEF] \d+ \d+\] .*(worker_pool|runtime_env)"}
"""Log files of a node, and a pattern of the lines that explain why a process did not start."""
_SHOWN = 3
_TAIL_BYTES, _TAIL_LINES, _LONGEST = 16 * 2**10, 200, 300
_LOG_S = 5
"""Timeout of a request to the dashboard, which serves the logs of other nodes."""


def ranks_have_processes() -> bool:
    """Return whether Ray has started a process for each rank of this driver."""
    ranks = [actor for actor in _actors() if actor["ActorClassName"] == _RANK]
    return bool(ranks) and all(actor["State"] == "ALIVE" for actor in ranks)


def why_ranks_wait(ranks: int, log: Path | None) -> str:
    """Explain in a sentence what the ranks of this driver wait for, with the end of the relevant log.

    Args:
        ranks: their number.
        log: log file of rank 0, if this node has it.
    """
    import ray

    if ranks_have_processes():
        lines = _tail(log) if log is not None else []
        end_of_log = f"; its log ends with: {lines[-1]}" if lines else ""
        return f"all {ranks} ranks have a process, but rank 0 has not started training{end_of_log}"
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    starting = {actor["Address"]["NodeID"] for actor in _actors() if actor["State"] == "PENDING_CREATION"}
    if not (starting := starting & nodes.keys()):
        return f"Ray has not placed {ranks} ranks yet"
    excerpts = "; ".join(f"{_name(nodes[node])}{_log_excerpts(nodes[node])}" for node in sorted(starting))
    return f"Ray has not started all processes of the {ranks} ranks: missing on {excerpts}"


class TaskStartProbe:
    """Records whether any of a group of tasks has started: Ray itself reports that only through a dashboard."""

    def __init__(self) -> None:
        self._key = f"multihop-begun-{secrets.token_hex(8)}"
        self._since = time.time()
        self._is_known = False

    def wrap(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return `function` with a prologue that records the start in Ray's key-value store."""
        key = self._key

        def record_start(item: Any) -> Any:
            from ray.experimental import internal_kv

            internal_kv._internal_kv_put(key, b"1")
            return function(item)

        return record_start

    def poll_interval_s(self) -> float | None:
        """Return the seconds after which to call `report` again; None once a task has started."""
        return None if self._is_known else SLOW_S

    def report(self, needs: dict[str, float]) -> None:
        """Print what the tasks wait for, if none has started.

        Args:
            needs: resources that each task reserves, by Ray's names; memory in bytes.
        """
        from ray.experimental import internal_kv

        self._is_known = internal_kv._internal_kv_exists(self._key)
        if not self._is_known:
            console.print(
                f"{clock()} no task has started for {time.time() - self._since:.0f} s: {why_tasks_wait(needs)}"
            )

    def close(self) -> None:
        """Remove the record from Ray's key-value store."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(self._key)


def why_tasks_wait(needs: dict[str, float]) -> str:
    """Explain in a sentence what tasks of this driver wait for, none of which has started.

    Args:
        needs: resources that each task reserves, by Ray's names; memory in bytes.
    """
    import ray

    needs = {kind: amount for kind, amount in needs.items() if amount}
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = free_resources()
    fits = [node for node in nodes if _holds(node["Resources"], needs)]
    is_free = [node for node in fits if _holds(free.get(node["NodeID"], {}), needs)]
    wanted = f"a task needs {' and '.join(_amount(kind, amount) for kind, amount in needs.items())}"
    if not fits:
        return f"{wanted}, and no node has that much; lower the request, or add a node"
    if not is_free:
        taken = ", ".join(f"{_amount(kind, sum(each.get(kind, 0) for each in free.values()))}" for kind in needs)
        return f"{wanted}, and none of the {len(fits)} nodes that are large enough has it free; free in total: {taken}"
    excerpts = "; ".join(f"{_name(node)}{_log_excerpts(node)}" for node in is_free[:_SHOWN])
    return f"{wanted}, which is free, but Ray has not started a worker process on {excerpts}"


def _holds(resources: dict[str, float], needs: dict[str, float]) -> bool:
    return all(resources.get(kind, 0) >= amount for kind, amount in needs.items())


def _amount(kind: str, amount: float) -> str:
    return f"{amount / 1e9:.1f} GB of memory" if kind == "memory" else f"{amount:g} {kind}{'' if amount == 1 else 's'}"


def kill_controllers() -> None:
    """Kill Ray Train's controllers of this driver, so that its `fit` ends: it would wait for ever for one whose process
    does not start."""
    import ray

    worker: Any = ray._private.worker.global_worker
    for actor in _actors():
        if actor["ActorClassName"] == _CONTROLLER:
            # ray.kill takes a handle, and Ray Train gives none.
            worker.core_worker.kill_actor(ray.ActorID.from_hex(actor["ActorID"]), True)


def _actors() -> list[dict[str, Any]]:
    """Return the actors of this driver that are not dead. Ray's public function needs the dashboard."""
    import ray

    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    return [actor for actor in ray._private.state.state.actor_table(None, job).values() if actor["State"] != "DEAD"]


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _log_excerpts(node: dict[str, Any]) -> str:
    """Return the last lines of the node's logs about starting processes.

    Output of a process that exits before it connects to Ray, and of its shell, is in raylet.err.
    """
    import ray

    context = ray.get_runtime_context()
    connection: Any = ray._private.worker._global_node
    folder = Path(connection.get_logs_dir_path())  # the same on all nodes
    excerpts = []
    for name, pattern in (*_LOG_PATTERNS.items(), (f"runtime_env_setup-{context.get_job_id()}.log", "")):
        if node["NodeID"] == context.get_node_id():
            lines = _tail(folder / name)
        else:
            lines = _tail_of_other(node["NodeID"], name)
        if lines := [line for line in lines if re.search(pattern, line)]:
            excerpts.append(f"{name} ends with: {' | '.join(lines[-_SHOWN:])}")
    return (
        f", where {', and '.join(excerpts)}"
        if excerpts
        else f" (see raylet.err and raylet.out in {folder} of that node)"
    )


def _tail(path: Path) -> list[str]:
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return _lines(file.read().decode(errors="replace"))
    except OSError:
        return []


def _tail_of_other(node: str, name: str) -> list[str]:
    """Return the end of a log of another node, fetched by the dashboard; empty if the cluster has none."""
    from ray.util.state import get_log

    try:
        return _lines("".join(get_log(node_id=node, filename=name, tail=_TAIL_LINES, timeout=_LOG_S)))
    except Exception:  # Ray documents no exceptions; besides its own, those of requests occur
        return []


def _lines(text: str) -> list[str]:
    return [safe_text(textwrap.shorten(line, _LONGEST, placeholder=" …")) for line in text.splitlines() if line.strip()]
