"""The rounds of a check: all nodes answer one question after another, so that no measurement disturbs another."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from multihop.cluster.doctor import store
from multihop.cluster.doctor.findings import ClusterReport, NodeReport
from multihop.cluster.doctor.measure_node import (
    ALL_REDUCE_TIMEOUT_S,
    all_reduce_rates,
    measure_compute,
    measure_machine,
    query_gpus,
    read_clock,
)
from multihop.cluster.ray.each_node import Call, Failed, Node, call_on_nodes, free_port, nodes_of_cluster
from multihop.cluster.tracking.connection import seconds_to_answer, server_uri
from multihop.common.errors import UserError

Echo = Callable[[str], object]

_ANSWER_S = 120.0
"""Timeout of a node's first answer: Ray starts a process, which may have to fetch the code first."""
_COMPUTE_S = 180.0
"""Timeout of the matrix products: torch may be imported from a cold disk."""
_STORE_S = 180.0
_SHORT_S = 30.0
_CLOCK_REPEATS = 5
_RANKS_ON_A_CPU_NODE = 2


@dataclass(frozen=True)
class CheckRequest:
    """The checks that `multihop doctor` is to make. A request is sent to a cluster as JSON, beside the code."""

    gpu: bool | None = False
    """Whether each node should have GPUs, which are checked too; None: if any node has GPUs."""
    stores: list[str] = field(default_factory=list)
    """Folders or s3:// locations that all nodes must write and read."""
    tracks: bool = False
    """Whether the head must reach MLflow."""
    tracking: str | None = None
    """MLflow's URI; None: MLFLOW_TRACKING_URI of the head, if set."""
    variables: list[str] = field(default_factory=list)
    """Environment variables required on every node."""
    ranks: int = 1
    """Least number of ranks of a run."""
    runs: str | None = None
    """Folder of all runs; None: unknown, or the runs are in an object store."""
    recipe: dict[str, Any] | None = None
    """Resolved recipe of which a step is trained, if `runs` has its data."""


def gather(request: CheckRequest, echo: Echo) -> ClusterReport:
    """Ask all nodes; the answers are JSON values, and {"error": reason} for a question that failed.

    Args:
        echo: called with a line about each round.

    Returns:
        nodes {name: report}, the head first, with address, is_head, cpus, gpus, free, machine, and for those that
        answered clock, compute, stores {location: …} and, if GPUs are checked, gpus_idle and gpus_after_work;
        links [{nodes, rates}]; lost (names); needs; and tracking, if it is requested.
    """
    nodes, lost = nodes_of_cluster()
    on_gpu = any(node.gpus for node in nodes) if request.gpu is None else request.gpu
    reports: dict[str, NodeReport] = {
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
            reports[call.node.name][question] = _as_json(answer)

    echo(f"{len(nodes)} nodes: versions, memory, disks")
    folders = [location for location in request.stores if "://" not in location]
    ask("machine", _ANSWER_S, [Call(node, measure_machine, (folders, request.variables)) for node in nodes])
    nodes = [node for node in nodes if "error" not in reports[node.name]["machine"]]
    echo("clocks")
    for node in nodes:
        reports[node.name]["clock"] = _clock(node)
    if on_gpu:  # before they have work, which takes memory
        echo("GPUs")
        ask("gpus_idle", _SHORT_S, [Call(node, query_gpus) for node in nodes])
    echo("matrix products")
    reserved = {node: node.gpus if on_gpu else 0 for node in nodes}
    ask("compute", _COMPUTE_S, [Call(node, measure_compute, (on_gpu,), gpus=reserved[node]) for node in nodes])
    if on_gpu:
        ask("gpus_after_work", _SHORT_S, [Call(node, query_gpus) for node in nodes])
    for location in request.stores:
        echo(f"reading and writing {location}")
        for name, answer in _store(location, nodes):
            reports[name].setdefault("stores", {})[location] = answer
    echo("all-reduce")
    report: ClusterReport = {"nodes": reports, "links": list(_links(nodes, on_gpu)), "lost": lost}
    report["needs"] = {"ranks": request.ranks, "gpu": on_gpu}
    if request.tracks and (uri := server_uri(request.tracking)) is not None:
        echo("MLflow")
        report["tracking"] = _ask_tracking(uri)
    return report


def _clock(node: Node) -> dict[str, Any]:
    """Measure how many seconds the node's clock is ahead of this process's, and the error of that: the best of
    some round trips, in the middle of which the node is assumed to have read its clock."""
    answers = []
    for _ in range(_CLOCK_REPEATS):
        before = time.time()
        (answer,) = call_on_nodes([Call(node, read_clock)], _SHORT_S)
        after = time.time()
        if isinstance(answer, Failed):
            return {"error": answer.reason}
        answers.append({"uncertainty": (after - before) / 2, "ahead": answer - (before + after) / 2})
    return min(answers, key=lambda each: each["uncertainty"])


def _store(location: str, nodes: Sequence[Node]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each node's name and its {error}, or the results of `store.write` and `store.read`."""
    trial, file_of = secrets.token_hex(4), {node: f"node-{number}" for number, node in enumerate(nodes)}
    try:
        wrote = call_on_nodes([Call(node, store.write, (location, trial, file_of[node])) for node in nodes], _STORE_S)
        results = {node: _as_json(answer) for node, answer in zip(nodes, wrote, strict=True)}
        writers = [node for node in nodes if "error" not in results[node]]
        others = {node: writers[(number + 1) % len(writers)] for number, node in enumerate(writers)}
        read = call_on_nodes(
            [Call(node, store.read, (location, trial, file_of[others[node]])) for node in writers], _STORE_S
        )
    finally:
        if "://" not in location:
            # This process runs on the head, and needs no new process of Ray's for it, which a busy machine may not
            # start in time. Where it fails, the nodes' tasks try again.
            with suppress(OSError):
                store.remove(location, trial)
        call_on_nodes([Call(node, store.remove, (location, trial)) for node in nodes], _SHORT_S)
    for node, answer in zip(writers, read, strict=True):
        results[node] |= _as_json(answer) | {"node_file": file_of[node], "read_of": others[node].name}
    return ((node.name, answer) for node, answer in results.items())


def _links(nodes: Sequence[Node], on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Measure all-reduce within each node, then between neighbors, as many pairs at once as have no node in common."""
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
    answers = iter(call_on_nodes(calls, ALL_REDUCE_TIMEOUT_S))
    for group, port in zip(groups, ports, strict=True):
        results = [port] if isinstance(port, Failed) else [next(answers) for _ in group]
        failed = [each.reason for each in results if isinstance(each, Failed)]
        names = list(dict.fromkeys(node.name for node in group))
        yield {"nodes": names, **({"error": "; ".join(dict.fromkeys(failed))} if failed else {"rates": results[0]})}


def _ask_tracking(uri: str) -> dict[str, Any]:
    try:
        return {"seconds": seconds_to_answer(uri)}
    except (ConnectionError, UserError) as error:
        return {"error": str(error)}


def _as_json(answer: Any) -> Any:
    return {"error": answer.reason} if isinstance(answer, Failed) else answer
