"""The nodes of a cluster, functions called on each of them with a timeout, and a node's ports and interfaces."""

import socket
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from multihop.cluster.ray.map import cancel_tasks, interruptible
from multihop.cluster.ray.watch import free_resources

_LONGEST_REASON = 300
_UNEXPECTED = 2
"""Ray's NodeDeathInfo.UNEXPECTED_TERMINATION: not `ray stop`, and not an autoscaler."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    id: str
    name: str
    """The host's name, with the address and port where another node has the same."""
    address: str
    is_head: bool
    cpus: float
    gpus: int
    free_cpus: int
    """Whole CPUs that no job has reserved."""
    free_gpus: int
    """Whole GPUs that no job has reserved."""


@dataclass(frozen=True)
class Call:
    """A function and its arguments for a node. The function must be importable on the node."""

    node: Node
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    gpus: int = 0
    """Number of GPUs that Ray reserves for the call."""


@dataclass(frozen=True)
class Failed:
    """The result of a call that gave no answer."""

    reason: str


def nodes_of_cluster() -> tuple[list[Node], list[str]]:
    """Return the live nodes, the head first and then by address; and the names of nodes that died without being
    stopped."""
    import ray

    table = ray.nodes()
    alive = [each for each in table if each["Alive"]]
    free = free_resources()
    alive.sort(key=lambda each: (not _is_head(each), _by_number(each["NodeManagerAddress"]), each["NodeManagerPort"]))
    nodes = [
        Node(
            id=each["NodeID"],
            name=name,
            address=each["NodeManagerAddress"],
            is_head=_is_head(each),
            cpus=each["Resources"].get("CPU", 0),
            gpus=int(each["Resources"].get("GPU", 0)),
            free_cpus=int(free.get(each["NodeID"], {}).get("CPU", 0)),
            free_gpus=int(free.get(each["NodeID"], {}).get("GPU", 0)),
        )
        for each, name in zip(alive, _names(alive), strict=True)
    ]
    addresses = {node.address for node in nodes}
    lost = {
        f"{each['NodeManagerHostname']} ({each['NodeManagerAddress']})"
        for each in table
        if not each["Alive"] and each["NodeManagerAddress"] not in addresses and each.get("DeathReason") == _UNEXPECTED
    }
    return nodes, sorted(lost)


def call_on_nodes(calls: Sequence[Call], timeout_s: float) -> list[Any]:
    """Run all calls at once, as Ray tasks that reserve no CPU: also a busy cluster answers.

    Returns:
        What each call returned, in the order of `calls`; a `Failed` if the call raised, its node was lost, or no answer
        came in `timeout_s`. Those calls are killed. If this process is interrupted, all calls are canceled.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not calls:
        return []
    references = [
        ray.remote(interruptible(call.function))
        .options(
            num_cpus=0,
            num_gpus=call.gpus,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(call.node.id, soft=False),
        )
        .remote(*call.arguments)
        for call in calls
    ]
    try:
        answered, unanswered = ray.wait(references, num_returns=len(references), timeout=timeout_s)
    except BaseException:
        cancel_tasks(references)
        raise
    for reference in unanswered:
        ray.cancel(reference, force=True)
    in_time = set(answered)
    return [
        _answer(reference) if reference in in_time else Failed(f"no answer within {timeout_s:.0f} s")
        for reference in references
    ]


def free_port(host: str) -> int:
    """Return a port of this address on which no process listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def interface_of(host: str) -> str:
    """Return the network interface with this address. By default gloo takes the first one, which other nodes may not
    reach."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return name
    raise RuntimeError(f"no network interface has Ray's address {host}")


def _answer(reference: Any) -> Any:
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        return Failed(f"{type(cause).__name__}: {_line(cause, -1)}")
    except ray.exceptions.RayError as error:
        return Failed(f"{type(error).__name__}: {_line(error, 0)}")


def _is_head(entry: dict[str, Any]) -> bool:
    return "node:__internal_head__" in entry["Resources"]


def _by_number(address: str) -> tuple[Any, ...]:
    """Sort key of an address: 10.0.0.9 comes before 10.0.0.10."""
    parts = address.split(".")
    return (0, *map(int, parts)) if all(part.isdigit() for part in parts) else (1, address)


def _names(table: list[dict[str, Any]]) -> list[str]:
    candidates = [
        (host, f"{host} ({address})", f"{host} ({address}, port {port})")
        for host, address, port in (
            (each["NodeManagerHostname"], each["NodeManagerAddress"], each["NodeManagerPort"]) for each in table
        )
    ]
    counts = [Counter(column) for column in zip(*candidates, strict=True)]
    return [
        next((name for name, count in zip(names, counts, strict=True) if count[name] == 1), names[-1])
        for names in candidates
    ]


def _line(error: Exception, which: int) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or ["no message"]
    return textwrap.shorten(lines[which], _LONGEST_REASON, placeholder=" …")
