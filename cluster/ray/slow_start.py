"""What ranks and tasks that have not begun wait for: room on the cluster, or a process that Ray starts."""

import os
import re
import secrets
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.console import clock, console
from common.files import open_regular
from common.redaction import shown

SLOW_S = 60.0
"""What has not begun for so long is told, again and again."""
_RANK = "RayTrainWorker"
"""Ray Train's class of the actors of ranks."""
_TOLD = {"raylet.err": "", "raylet.out": r" [WEF] \d+ \d+\] .*(worker_pool|runtime_env)"}
"""Logs of a node, and a pattern of the lines that say why a process did not start."""
_SHOWN = 3
_TAIL_BYTES, _TAIL_LINES, _LONGEST = 16 * 2**10, 200, 300
_LOG_S = 5
"""For an answer of the dashboard, which has the logs of other nodes."""


def have_processes() -> bool:
    """Whether Ray has started a process for each rank of this driver."""
    ranks = [actor for actor in _actors() if actor["ActorClassName"] == _RANK]
    return bool(ranks) and all(actor["State"] == "ALIVE" for actor in ranks)


def waits_for(ranks: int, log: Path | None) -> str:
    """What the ranks of this driver wait for, in a sentence that ends with what the log of that says.

    Args:
        log: of rank 0, if this node has it.
    """
    import ray

    if have_processes():
        lines = _tail(log) if log is not None else []
        said = f"; its log ends with: {lines[-1]}" if lines else ""
        return f"the processes of {ranks} ranks are there, and rank 0 has not begun to train{said}"
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    starting = {actor["Address"]["NodeID"] for actor in _actors() if actor["State"] == "PENDING_CREATION"}
    if not (starting := starting & nodes.keys()):
        return f"Ray has not placed {ranks} ranks yet"
    said = "; ".join(f"{_name(nodes[node])}{_complaints(nodes[node])}" for node in sorted(starting))
    return f"Ray has not started a process of the {ranks} ranks on {said}"


class Beginning:
    """Whether any of some tasks has begun, which Ray tells only if the cluster has a dashboard."""

    def __init__(self) -> None:
        self._key = f"multihop-begun-{secrets.token_hex(8)}"
        self._since = time.time()
        self._is_known = False

    def noted(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The function, which notes first that it has begun."""
        key = self._key

        def noting(item: Any) -> Any:
            from ray.experimental import internal_kv

            internal_kv._internal_kv_put(key, b"1")
            return function(item)

        return noting

    def look_again_s(self) -> float | None:
        """Seconds after which to call `tell`; None: not any more."""
        return None if self._is_known else SLOW_S

    def tell(self, needs: dict[str, float]) -> None:
        """Print what the tasks wait for, if none has begun.

        Args:
            needs: what each reserves, by Ray's names; memory in bytes.
        """
        from ray.experimental import internal_kv

        self._is_known = internal_kv._internal_kv_exists(self._key)
        if not self._is_known:
            console.print(f"{clock()} no task has begun for {time.time() - self._since:.0f} s: {tasks_wait_for(needs)}")

    def forget(self) -> None:
        """Remove the note."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(self._key)


def tasks_wait_for(needs: dict[str, float]) -> str:
    """What tasks of this driver wait for, of which none has begun.

    Args:
        needs: what each reserves, by Ray's names; memory in bytes.
    """
    import ray

    needs = {kind: amount for kind, amount in needs.items() if amount}
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = ray._private.state.state.available_resources_per_node()
    fits = [node for node in nodes if _holds(node["Resources"], needs)]
    is_free = [node for node in fits if _holds(free.get(node["NodeID"], {}), needs)]
    wanted = f"a task needs {' and '.join(_amount(kind, amount) for kind, amount in needs.items())}"
    if not fits:
        return f"{wanted}, and no node has so much; lower that, or add a node"
    if not is_free:
        taken = ", ".join(f"{_amount(kind, sum(each.get(kind, 0) for each in free.values()))}" for kind in needs)
        return f"{wanted}, and of the {len(fits)} nodes that have it none has it free; free are {taken} in all"
    said = "; ".join(f"{_name(node)}{_complaints(node)}" for node in is_free[:_SHOWN])
    return f"{wanted}, which is free, and Ray has not started a process for it on {said}"


def _holds(resources: dict[str, float], needs: dict[str, float]) -> bool:
    return all(resources.get(kind, 0) >= amount for kind, amount in needs.items())


def _amount(kind: str, amount: float) -> str:
    return f"{amount / 1e9:.1f} GB of memory" if kind == "memory" else f"{amount:g} {kind}{'' if amount == 1 else 's'}"


def _actors() -> list[dict[str, Any]]:
    """Of this driver, but for those that have ended. Ray's public list needs the dashboard."""
    import ray

    job = ray.JobID(bytes.fromhex(ray.get_runtime_context().get_job_id()))
    return [actor for actor in ray._private.state.state.actor_table(None, job).values() if actor["State"] != "DEAD"]


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _complaints(node: dict[str, Any]) -> str:
    """How the node's logs about starting processes end.

    What a process prints that ends before it has reached Ray, its shell included, is in raylet.err.
    """
    import ray

    context = ray.get_runtime_context()
    connection: Any = ray._private.worker._global_node
    folder = Path(connection.get_logs_dir_path())  # the same on all nodes
    said = []
    for name, told in (*_TOLD.items(), (f"runtime_env_setup-{context.get_job_id()}.log", "")):
        if node["NodeID"] == context.get_node_id():
            lines = _tail(folder / name)
        else:
            lines = _tail_of_other(node["NodeID"], name)
        if lines := [line for line in lines if re.search(told, line)]:
            said.append(f"{name} ends with: {' | '.join(lines[-_SHOWN:])}")
    return f", where {', and '.join(said)}" if said else f" (see raylet.err and raylet.out there in {folder})"


def _tail(path: Path) -> list[str]:
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return _lines(file.read().decode(errors="replace"))
    except OSError:
        return []


def _tail_of_other(node: str, name: str) -> list[str]:
    """Of another node: empty where the cluster has no dashboard, which fetches it."""
    from ray.util.state import get_log

    try:
        return _lines("".join(get_log(node_id=node, filename=name, tail=_TAIL_LINES, timeout=_LOG_S)))
    except Exception:  # Ray's, those of requests, and others: it has no list of them
        return []


def _lines(text: str) -> list[str]:
    return [shown(textwrap.shorten(line, _LONGEST, placeholder=" …")) for line in text.splitlines() if line.strip()]
