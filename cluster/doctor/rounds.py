"""What is asked of the nodes: one question after another, so that no measurement disturbs another on its node."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multihop.cluster.doctor import store
from multihop.cluster.doctor.all_reduce import TIMEOUT_S as ALL_REDUCE_S
from multihop.cluster.doctor.all_reduce import all_reduce_rates
from multihop.cluster.doctor.compute import compute
from multihop.cluster.doctor.facts import clock, machine
from multihop.cluster.doctor.finding import ClusterReport, NodeReport
from multihop.cluster.doctor.gpu import gpus
from multihop.cluster.doctor.order import CheckRequest
from multihop.cluster.ray.each_node import Call, Failed, Node, call_on_nodes, nodes_of_cluster
from multihop.cluster.ray.network import free_port
from multihop.cluster.tracking.reach import seconds_to_answer, server_uri
from multihop.common.errors import UserError

Say = Callable[[str], object]

_ANSWER_S = 120.0
"""For the first answer of a node: Ray starts a process, which may have to fetch the code first."""
_COMPUTE_S = 180.0
"""torch is imported, from a cold disk perhaps."""
_STORE_S = 180.0
_SHORT_S = 30.0
_CLOCK_REPEATS = 5
_RANKS_ON_A_CPU_NODE = 2


def gather(order: CheckRequest, say: Say) -> ClusterReport:
    """All facts, as values of JSON. What failed stands as {"error": reason} in the place of its answer.

    Args:
        say: takes a line about what is being done.

    Returns:
        nodes {name: facts}, the head first, with address, is_head, cpus, gpus, free, machine, and for those that
        answered clock, compute, places {location: …} and, where GPUs are asked for, gpus_idle and gpus_after_work;
        links [{nodes, rates}]; lost (names); needs; and tracking, if it is asked for.
    """
    nodes, lost = nodes_of_cluster()
    on_gpu = any(node.gpus for node in nodes) if order.gpu is None else order.gpu
    facts: dict[str, NodeReport] = {
        node.name: {
            "address": node.address,
            "is_head": node.is_head,
            "cpus": node.cpus,
            "gpus": node.gpus,
            "free": {"cpus": node.free_cpus, "gpus": node.free_gpus},
        }
        for node in nodes
    }

    def ask(question: str, timeout_s: float, calls: Sequence[Call]) -> None:
        for call, answer in zip(calls, call_on_nodes(calls, timeout_s), strict=True):
            facts[call.node.name][question] = _as_json(answer)

    say(f"{len(nodes)} nodes: versions, memory, disks")
    folders = [place for place in order.places if "://" not in place]
    ask("machine", _ANSWER_S, [Call(node, machine, (folders, order.variables)) for node in nodes])
    nodes = [node for node in nodes if "error" not in facts[node.name]["machine"]]
    say("clocks")
    for node in nodes:
        facts[node.name]["clock"] = _clock(node)
    if on_gpu:  # before they have work, which takes memory
        say("GPUs")
        ask("gpus_idle", _SHORT_S, [Call(node, gpus) for node in nodes])
    say("matrix products")
    reserved = {node: node.gpus if on_gpu else 0 for node in nodes}
    ask("compute", _COMPUTE_S, [Call(node, compute, (on_gpu,), gpus=reserved[node]) for node in nodes])
    if on_gpu:
        ask("gpus_after_work", _SHORT_S, [Call(node, gpus) for node in nodes])
    for place in order.places:
        say(f"reading and writing {place}")
        for name, found in _place(place, nodes):
            facts[name].setdefault("places", {})[place] = found
    say("all-reduce")
    report: ClusterReport = {"nodes": facts, "links": list(_links(nodes, on_gpu)), "lost": lost}
    report["needs"] = {"ranks": order.ranks, "gpu": on_gpu}
    if order.tracks and (uri := server_uri(order.tracking)) is not None:
        say("MLflow")
        report["tracking"] = _tracking(uri)
    return report


def _clock(node: Node) -> dict[str, Any]:
    """How far the node's clock is ahead of this process's, and by how much that may be wrong, in seconds: the best of
    some round trips, in the middle of which the node is taken to have looked."""
    found = []
    for _ in range(_CLOCK_REPEATS):
        before = time.time()
        (answer,) = call_on_nodes([Call(node, clock)], _SHORT_S)
        after = time.time()
        if isinstance(answer, Failed):
            return {"error": answer.reason}
        found.append({"uncertainty": (after - before) / 2, "ahead": answer - (before + after) / 2})
    return min(found, key=lambda each: each["uncertainty"])


def _place(place: str, nodes: Sequence[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each node found in one place: {error} or that of `store.write` and `store.read`."""
    trial, own = secrets.token_hex(4), {node: f"node-{number}" for number, node in enumerate(nodes)}
    try:
        wrote = call_on_nodes([Call(node, store.write, (place, trial, own[node])) for node in nodes], _STORE_S)
        facts = {node: _as_json(answer) for node, answer in zip(nodes, wrote, strict=True)}
        writers = [node for node in nodes if "error" not in facts[node]]
        others = {node: writers[(number + 1) % len(writers)] for number, node in enumerate(writers)}
        read = call_on_nodes([Call(node, store.read, (place, trial, own[others[node]])) for node in writers], _STORE_S)
    finally:
        call_on_nodes([Call(node, store.remove, (place, trial)) for node in nodes], _SHORT_S)
    for node, answer in zip(writers, read, strict=True):
        facts[node] |= _as_json(answer) | {"own": own[node], "read_of": others[node].name}
    return ((node.name, found) for node, found in facts.items())


def _links(nodes: Sequence[Node], on_gpu: bool) -> Iterator[dict[str, Any]]:
    """All-reduce within each node, then between neighbours, as many pairs at once as have no node in common."""
    within = [[node] * (node.gpus if on_gpu else _RANKS_ON_A_CPU_NODE) for node in nodes]
    around = [[node, nodes[(number + 1) % len(nodes)]] for number, node in enumerate(nodes)]
    even, odd = around[0 : len(nodes) - 1 : 2], around[1 : len(nodes) - 1 : 2]
    last = around[-1:] if len(nodes) > 2 else []
    for groups in ([group for group in within if len(group) > 1], even, odd, last):
        yield from _all_reduce(groups, on_gpu)


def _all_reduce(groups: Sequence[Sequence[Node]], on_gpu: bool) -> Iterator[dict[str, Any]]:
    ports = call_on_nodes([Call(group[0], free_port, (group[0].address,)) for group in groups], _SHORT_S)
    calls = [
        Call(
            node,
            all_reduce_rates,
            (rank, len(group), group[0].address, node.address, port, secret),
            gpus=1 if on_gpu else 0,
        )
        for group, port in zip(groups, ports, strict=True)
        if not isinstance(port, Failed)
        for secret in [secrets.token_hex(32)]
        for rank, node in enumerate(group)
    ]
    answers = iter(call_on_nodes(calls, ALL_REDUCE_S))
    for group, port in zip(groups, ports, strict=True):
        found = [port] if isinstance(port, Failed) else [next(answers) for _ in group]
        failed = [each.reason for each in found if isinstance(each, Failed)]
        names = list(dict.fromkeys(node.name for node in group))
        yield {"nodes": names, **({"error": "; ".join(dict.fromkeys(failed))} if failed else {"rates": found[0]})}


def _tracking(uri: str) -> dict[str, Any]:
    try:
        return {"seconds": seconds_to_answer(uri)}
    except (ConnectionError, UserError) as error:
        return {"error": str(error)}


def _as_json(answer: Any) -> Any:
    return {"error": answer.reason} if isinstance(answer, Failed) else answer
